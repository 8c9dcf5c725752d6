/** A walk through the iterations of one run: what was proposed, what stood, what fell, what the model said instead. */

import { outcome } from "./trace.js";

const WORDS = { own: "the model’s own", stood: "stood", fell: "fell", unreached: "not reached" };
const quoted = (token) => `“${visible(token.text)}”`;
// Most tokens begin with a space, which would only spread them out.
const visible = (text) => text.replace(/^ (?=.)/, "").replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ *$/, "␣");

export class Steps {
  #root;
  #iterations;
  #shown;
  #index = 0;

  /**
   * @param {Element} root the `.steps` of a pane
   * @param {object[]} iterations those of a trace
   * @param {(index: number) => void} shown is told which iteration is shown
   */
  constructor(root, iterations, shown) {
    this.#root = root;
    this.#iterations = iterations;
    this.#shown = shown;
    this.#part("back").addEventListener("click", () => this.move(-1));
    this.#part("on").addEventListener("click", () => this.move(1));
  }

  /** Show the first iteration, if there is one. */
  begin() {
    this.#root.hidden = this.#iterations.length === 0;
    this.move(0);
  }

  /** Go on by so many iterations, or back. */
  move(by) {
    const last = this.#iterations.length - 1;
    if (last < 0 || this.#root.hidden) return;
    this.#index = Math.min(Math.max(this.#index + by, 0), last);
    const iteration = this.#iterations[this.#index];
    this.#part("place").textContent = `Iteration ${this.#index + 1} of ${last + 1}, ${iteration.took.toFixed(1)} ms`;
    const found = outcome(iteration);
    this.#part("story").textContent = story(iteration, found);
    this.#part("columns").replaceChildren(...found.columns.map(column));
    this.#shown(this.#index);
  }

  #part(name) {
    return this.#root.querySelector(`.${name}`);
  }
}

function story({ tokens, proposals }, { columns, stood, checked, fell, own }) {
  if (!proposals.length) {
    const unchecked = tokens.some((token) => token.source === "confident");
    return unchecked ? "Drafted, and kept without a check." : "No draft: the model wrote one token.";
  }
  const tree = columns.some((candidates) => candidates.filter((one) => one.after !== undefined).length > 1);
  const shape = tree ? " A tree: the candidates for one place stand below each other." : "";
  const last = own.at(-1);
  if (fell && last) return `${stood} of ${checked} drafted tokens stood. The model said ${quoted(last)} instead of ${quoted(fell)}.${shape}`;
  return `${stood} of ${checked} drafted tokens stood${last ? `, and the model added ${quoted(last)}` : ""}.${shape}`;
}

function column(candidates) {
  const item = document.createElement("li");
  item.append(...candidates.map(chip));
  return item;
}

function chip({ text, state }) {
  const shown = document.createElement("span");
  shown.className = `chip ${state}`;
  shown.title = WORDS[state];
  shown.textContent = visible(text);
  const word = document.createElement("span");
  word.className = "unseen";
  word.textContent = ` ${WORDS[state]}`;
  shown.append(word);
  return shown;
}

/** One run on the page: its text, chart, figures and steps. Text of the model never becomes markup of its own. */

import { Chart } from "./chart.js";
import { copies, show } from "./markdown.js";
import { Steps } from "./steps.js";
import { Trace } from "./trace.js";

const NONE = "–";
const number = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : NONE);

export class Pane {
  trace = new Trace();
  steps;
  name;
  #root;
  #chart;
  #spans = [];
  #starts = []; // index of each iteration's first span
  #due = false;

  /** Append an empty pane to `parent`. */
  constructor(parent, policy) {
    const template = document.getElementById("pane").content.firstElementChild;
    this.name = policy;
    this.#root = parent.appendChild(template.cloneNode(true));
    this.#chart = new Chart(this.#part("chart"));
    this.steps = new Steps(this.#part("steps"), this.trace.iterations, (index) => this.#point(index));
    copies(this.#part("copy"), () => this.trace.text);
    this.#part("policy").textContent = policy;
    this.#part("badge").hidden = true;
    for (const name of ["accepted-rate", "saved"]) this.#part(name).textContent = NONE;
    this.#update();
  }

  /** Whether an element is part of it. */
  holds(element) {
    return this.#root.contains(element);
  }

  /** Say how the text is being decoded: the event's `decoding`. */
  describe({ policy, block_size, lossless }, seed) {
    const words = [policy, block_size > 1 && `blocks of ${block_size}`, seed !== null && `seed ${seed}`];
    this.#part("policy").textContent = words.filter(Boolean).join(" · ");
    const badge = this.#part("badge");
    badge.textContent = lossless ? "lossless" : "lossy";
    badge.title = lossless ? "the text is what one token at a time would give" : "the text may differ";
    badge.classList.add(lossless ? "good" : "warning");
    badge.hidden = false;
  }

  /** Show the tokens of one event. */
  add(event) {
    const first = this.trace.ids.length === 0;
    this.trace.add(event);
    if (!first) {
      this.#starts.push(this.#spans.length);
      this.#chart.add(event.tokens.map((token) => token.source), event.ms, this.trace.iterations.at(-1).took);
    }
    const spans = event.tokens.map(written);
    this.#spans.push(...spans);
    this.#part("text").append(...spans);
    this.#update();
  }

  /** Show what only the server knows: the event's `usage`. */
  finish({ draft_acceptance_rate, num_spec_steps, passes }) {
    this.#part("saved").textContent = this.trace.saved(passes);
    if (num_spec_steps) this.#part("accepted-rate").textContent = `${(100 * draft_acceptance_rate).toFixed(0)}%`;
  }

  /** Mark the token with this index; one beyond the end has nothing to mark. */
  mark(index) {
    this.#spans[index]?.classList.add("differs");
  }

  /** Fit the chart to so many milliseconds, and iterations of up to so many tokens. */
  scale(ms, rows) {
    this.#part("top").textContent = rows;
    this.#part("span").textContent = number(ms / 1000, 2);
    this.#chart.fit(ms, rows);
  }

  /** Show the text as Markdown too; soon, because it may grow at once. */
  format() {
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#due = false;
      show(this.#part("formatted"), this.trace.text);
    });
  }

  #point(index) {
    this.#chart.point(index);
    const [from, to] = [this.#starts[index], this.#starts[index + 1] ?? this.#spans.length];
    for (const [place, span] of this.#spans.entries()) span.toggleAttribute("data-current", from <= place && place < to);
  }

  #update() {
    const { ids, iterations, speed, meanLength, time } = this.trace;
    this.#part("speed").textContent = number(speed, 0);
    this.#part("tokens").textContent = ids.length;
    this.#part("seconds").textContent = iterations.length ? number(time / 1000, 2) : NONE;
    this.#part("length").textContent = number(meanLength, 2);
    this.#chart.label = `Tokens per iteration: ${iterations.length} iterations, mean ${number(meanLength, 2)}`;
    if (document.getElementById("formatted").checked) this.format();
  }

  #part(name) {
    return this.#root.querySelector(`.${name}`);
  }
}

/** A token as text. Its word is an element of its own, so that a line can be drawn under it and not under its spaces. */
function written({ id, text, source }) {
  const span = document.createElement("span");
  const word = document.createElement("u");
  word.textContent = text.trim();
  const [before, after] = word.textContent ? text.split(word.textContent) : [text, ""];
  span.append(before, word, after);
  span.className = source;
  span.title = `${source}, token ${id}`;
  return span;
}

/** Give the charts of panes that stand side by side one scale. */
export function alignCharts(panes) {
  const ms = Math.max(1, ...panes.map((pane) => pane.trace.time || 0));
  const rows = Math.max(2, ...panes.flatMap((pane) => pane.trace.iterations.map((one) => one.tokens.length)));
  for (const pane of panes) pane.scale(ms, rows);
}

/** One run on the page: its text, chart and figures. Text of the model only ever becomes a text node. */

import { Chart } from "./chart.js";
import { Trace } from "./trace.js";

const NONE = "–";
const number = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : NONE);

export class Pane {
  trace = new Trace();
  #root;
  #chart;
  #spans = [];

  /** Append an empty pane to `parent`. */
  constructor(parent, policy) {
    const template = document.getElementById("pane").content.firstElementChild;
    this.#root = parent.appendChild(template.cloneNode(true));
    this.#chart = new Chart(this.#part("chart"));
    this.#part("policy").textContent = policy;
    this.#part("badge").hidden = true;
    for (const name of ["accepted-rate", "saved"]) this.#part(name).textContent = NONE;
    this.#update();
  }

  /** Say how the text is being decoded: the event's `decoding`. */
  describe({ policy, block_size, lossless }, seed) {
    const words = [policy, block_size > 1 && `D=${block_size}`, seed !== null && `seed ${seed}`];
    this.#part("policy").textContent = words.filter(Boolean).join(" · ");
    const badge = this.#part("badge");
    badge.textContent = lossless ? "lossless" : "lossy";
    badge.classList.add(lossless ? "good" : "warning");
    badge.hidden = false;
  }

  /** Show the tokens of one event. */
  add(tokens) {
    const first = this.trace.ids.length === 0;
    this.trace.add(tokens, performance.now());
    if (!first) this.#chart.add(tokens.map((token) => token.source));
    const spans = tokens.map(({ id, text, source }) => {
      const span = document.createElement("span");
      span.className = source;
      span.textContent = text;
      span.title = `${source}, token ${id}`;
      return span;
    });
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

  /** Fit the chart to so many iterations, of up to so many tokens. */
  scale(columns, rows) {
    this.#part("top").textContent = rows;
    this.#chart.fit(columns, rows);
  }

  #update() {
    const { ids, lengths, speed, meanLength } = this.trace;
    this.#part("tokens").textContent = ids.length;
    this.#part("speed").textContent = number(speed, 1);
    this.#part("length").textContent = number(meanLength, 2);
    this.#chart.label = `Tokens per iteration: ${lengths.length} iterations, mean ${number(meanLength, 2)}`;
  }

  #part(name) {
    return this.#root.querySelector(`.${name}`);
  }
}

/** Give the charts of panes that stand side by side one scale. */
export function alignCharts(panes) {
  const columns = Math.max(48, ...panes.map((pane) => pane.trace.lengths.length));
  const rows = Math.max(2, ...panes.flatMap((pane) => pane.trace.lengths));
  for (const pane of panes) pane.scale(columns, rows);
}

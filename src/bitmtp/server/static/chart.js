/** A strip chart over time: a column for each iteration, a cell for each token, coloured as the text is. */

const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  #svg;
  #columns = [];

  constructor(svg) {
    this.#svg = svg;
  }

  /** Append an iteration that committed tokens from these sources, in order, and ended after `ms`. */
  add(sources, ms, took) {
    const group = document.createElementNS(SVG, "g");
    const cells = sources.map((source, row) => {
      const cell = document.createElementNS(SVG, "rect");
      const place = { class: source, x: ms - 0.9 * took, y: -row - 0.95, width: Math.max(0.8 * took, 0), height: 0.9 };
      for (const [name, value] of Object.entries(place)) cell.setAttribute(name, value);
      return cell;
    });
    group.append(...cells);
    this.#svg.append(group);
    this.#columns.push(group);
  }

  /** Point at an iteration. */
  point(index) {
    for (const [place, column] of this.#columns.entries()) column.classList.toggle("current", place === index);
  }

  /** Show so many milliseconds, and iterations of up to so many tokens; charts that fit the same can be compared. */
  fit(ms, rows) {
    this.#svg.setAttribute("viewBox", `0 ${-rows} ${ms} ${rows}`);
  }

  /** What it shows, in words. */
  set label(text) {
    this.#svg.setAttribute("aria-label", text);
  }
}

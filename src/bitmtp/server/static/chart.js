/** A strip chart: a column for each iteration, a cell for each token, coloured as the text is. */

const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  #svg;
  #columns = 0;

  constructor(svg) {
    this.#svg = svg;
  }

  /** Append an iteration that committed tokens from these sources, in order. */
  add(sources) {
    const cells = sources.map((source, row) => {
      const cell = document.createElementNS(SVG, "rect");
      const place = { class: source, x: this.#columns + 0.1, y: -row - 0.95, width: 0.8, height: 0.9 };
      for (const [name, value] of Object.entries(place)) cell.setAttribute(name, value);
      return cell;
    });
    this.#svg.append(...cells);
    this.#columns += 1;
  }

  /** Make room for so many iterations, of up to so many tokens; charts that fit the same can be compared. */
  fit(columns, rows) {
    this.#svg.setAttribute("viewBox", `0 ${-rows} ${columns} ${rows}`);
  }

  /** What it shows, in words. */
  set label(text) {
    this.#svg.setAttribute("aria-label", text);
  }
}

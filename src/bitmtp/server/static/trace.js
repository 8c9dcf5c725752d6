/** What one run has written so far, and the figures that follow. The names are those of docs/decoding.md. */
export class Trace {
  ids = [];
  lengths = []; // tokens that each iteration committed; the first token comes from the prompt and belongs to none
  #first = null;
  #last = null;

  /** Take the tokens of one event, which are those of one iteration; `now` is in milliseconds. */
  add(tokens, now) {
    this.ids.push(...tokens.map((token) => token.id));
    this.#last = now;
    if (this.#first === null) {
      this.#first = now;
      return;
    }
    this.lengths.push(tokens.length);
  }

  get #decoded() {
    return Math.max(this.ids.length - 1, 0);
  }

  /** Tokens a second, the first left out; NaN before there are any. */
  get speed() {
    return (1000 * this.#decoded) / (this.#last - this.#first);
  }

  /** Mean acceptance length; NaN before the first iteration. */
  get meanLength() {
    return this.#decoded / this.lengths.length;
  }

  /** How many more passes autoregressive decoding would have run than these. */
  saved(passes) {
    return this.#decoded - passes;
  }

  /** Index of the first token that differs from another run's; -1 if none does. */
  difference(other) {
    const longer = this.ids.length > other.ids.length ? this.ids : other.ids;
    return longer.findIndex((_, index) => this.ids[index] !== other.ids[index]);
  }
}

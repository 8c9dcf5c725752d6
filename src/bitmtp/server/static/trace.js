/** What one run has written so far, and the figures that follow. The names are those of docs/decoding.md. */
export class Trace {
  ids = [];
  text = "";
  iterations = []; // { tokens, proposals, ms, took }; the first token comes from the prompt and belongs to none
  #last = 0;

  /** Take one event's tokens, the `proposals` that were checked for them, and when: `ms` after the first token. */
  add({ tokens, proposals = [], ms }) {
    if (this.ids.length) this.iterations.push({ tokens, proposals, ms, took: ms - this.#last });
    this.ids.push(...tokens.map((token) => token.id));
    this.text += tokens.map((token) => token.text).join("");
    this.#last = ms;
  }

  get #decoded() {
    return Math.max(this.ids.length - 1, 0);
  }

  /** Milliseconds from the first token to the last. */
  get time() {
    return this.#last;
  }

  /** Tokens a second, the first left out; NaN before there are any. */
  get speed() {
    return (1000 * this.#decoded) / this.#last;
  }

  /** Mean acceptance length; NaN before the first iteration. */
  get meanLength() {
    return this.#decoded / this.iterations.length;
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

/**
 * What became of an iteration's proposals.
 *
 * @returns {{columns: object[][], stood: number, checked: number, fell: ?object, own: object[]}} for each place behind
 *   the text its candidates, each a token with its `state`: "own" (the model's), "stood", "fell" or "unreached"; how
 *   many of the `checked` drafts stood; the draft that fell where the model went another way; the model's own tokens
 */
export function outcome({ tokens, proposals }) {
  const path = follow(tokens, proposals);
  const reached = new Set([-1, ...path]);
  const depths = [];
  const columns = tokens.slice(path.length).map((token) => [{ ...token, state: kind(token) }]);
  columns.unshift(...path.map(() => []));
  for (const [index, proposal] of proposals.entries()) {
    const depth = (depths[index] = proposal.after < 0 ? 0 : depths[proposal.after] + 1);
    const stood = path[depth] === index;
    const state = stood ? kind(tokens[depth]) : reached.has(proposal.after) ? "fell" : "unreached";
    (columns[depth] ??= [])[stood ? "unshift" : "push"]({ ...proposal, state });
  }
  const own = tokens.filter((token) => token.source === "exact");
  const known = path.filter((_, depth) => tokens[depth].source === "exact").length; // the draft pass knew it already
  const fell = columns[path.length]?.find((candidate) => candidate.state === "fell") ?? null;
  return { columns, stood: path.length - known, checked: proposals.length - known, fell, own };
}

const kind = (token) => (token.source === "exact" ? "own" : "stood");

/** Numbers of the proposals that became text, in order. */
function follow(tokens, proposals) {
  const path = [];
  for (const { id } of tokens) {
    const found = proposals.findIndex((one) => one.after === (path.at(-1) ?? -1) && one.id === id);
    if (found < 0) break;
    path.push(found);
  }
  return path;
}

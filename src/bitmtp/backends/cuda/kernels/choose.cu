// From raw logits to tokens, probabilities, entropies and alternatives (docs/sampling.md, "Choosing a token").
//
// `partials`, one block per 1,024 ids and row, then `merge`, one block per row. Every sum has one order, given by the
// vocabulary alone. Rows with penalties, bias or a grammar need `partials_adjusted` instead, which treats other rows alike;
// rows with top-k, top-p or min-p need `gather` and `filter` after `merge` as well. Mask rows of a model with a chain then
// go through `chain`.
#include "choose_chain.cuh"
#include "choose_filter.cuh"
#include "choose_merge.cuh"
#include "choose_partials.cuh"

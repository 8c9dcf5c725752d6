// Proposals that need no draft: what followed the last time that the text ended as it does now. Texts quote themselves and
// their prompts; prompt lookup decoding (Saxena, 2023; LLMA, arXiv:2304.04487).
#pragma once

#include "text.hpp"

namespace core {

constexpr int GRAM = 3;      // tokens that have to agree at least
constexpr int LONGEST = 32;  // agreement beyond this says no more
constexpr unsigned MIX = 0x9E3779B1u;
constexpr int REMEMBERED = 64;  // ends brought into the chains at once

struct Match {
    int shared, end;
};

// Of the run of GRAM tokens that ends at `end`.
CORE unsigned hash(const Past& past, const int* text, int end) {
    unsigned mixed = 0;
    ROLLED
    for (int i = end - GRAM; i < end; ++i) mixed = (mixed + unsigned(text[i])) * MIX;
    return mixed >> past.shift;
}

CORE bool same_gram(const int* text, int a, int b) {
    ROLLED
    for (int i = 1; i <= GRAM; ++i)
        if (text[a - i] != text[b - i]) return false;
    return true;
}

// Brings ends before `length` into the chains, at most REMEMBERED: each is linked to the latest before it with its hash, among
// the new ones or in the chains; then the last of each hash becomes its head.
CORE void remember_some(Past& past, const int* text, int length, unsigned* hashes) {
    int first = past.known, count = least(length - first, REMEMBERED);
    each(count, [&](int i) { hashes[i] = hash(past, text, first + i); });
    each(count, [&](int i) {
        int other = i - 1;
        ROLLED
        while (other >= 0 && hashes[other] != hashes[i]) --other;
        past.links[first + i] = other >= 0 ? first + other : past.heads[hashes[i]];
    });
    each(count, [&](int i) {
        int other = i + 1;
        ROLLED
        while (other < count && hashes[other] != hashes[i]) ++other;
        if (other == count) past.heads[hashes[i]] = first + i;
    });
    once([&] { past.known = first + count; });
}

// How many tokens the text's end shares with the latest place where its last GRAM tokens stood before, and where that place
// ends; {0, 0} if there is none.
CORE Match match(Past& past, const int* text, int length, unsigned* hashes) {
    ROLLED
    while (past.known < length) remember_some(past, text, length, hashes);
    if (length <= GRAM) return {0, 0};
    int end = past.heads[hash(past, text, length)];
    ROLLED
    while (end && !same_gram(text, end, length)) end = past.links[end];
    if (!end) return {0, 0};
    int further = prefix(least(LONGEST, end) - GRAM,
                         [&](int i) { return text[end - 1 - GRAM - i] == text[length - 1 - GRAM - i]; });
    return {GRAM + further, end};
}

}  // namespace core

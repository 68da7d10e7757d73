// Suffix decoding's index and search. They are native because a step finds the caches swept by the weights that the
// pass has read: what takes 20 us in Python's objects while they are warm takes 200 between two passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

using std::size_t;

// From 64-bit keys to 32-bit values: open addressing, linear probing. Nothing is ever taken out.
class Table {
 public:
  // Where the key's value is, or nullptr; valid until the next `at`.
  const int32_t* find(uint64_t key) const;
  // The key's value, `start` if it is new; valid until the next `at`.
  int32_t& at(uint64_t key, int32_t start);

 private:
  struct Entry {
    uint64_t key = kFree;
    int32_t value = 0;
  };
  static constexpr uint64_t kFree = ~uint64_t{0};
  size_t place(uint64_t key) const;
  void grow();

  std::vector<Entry> entries_{64};
  size_t used_ = 0;
};

// A tree over every context of a text, read backwards, with what followed each.
//
// The path from the root spells a context from its last token to earlier ones; a node at depth m stands for a context
// of m tokens. Both adding a token and finding the longest context known walk one path. The tree is lazy: a context
// keeps a bare list of positions (a leaf) as long as one and the same token always followed it, and becomes a node with
// counts when a second one does. So new text costs about one leaf per token, copied text lengthens lists, and depth
// appears only where it decides something.
//
// This is the suffix-link tree of the text's suffix automaton, cut at kDepth, with counts (compare the suffix trees of
// arXiv 2411.04975, and prediction by partial matching).
class ContextTree {
 public:
  static constexpr int32_t kSeparator = -1;  // stands between texts; no context reaches across it
  static constexpr int kDepth = 16;          // longest context with counts of its own
  static constexpr int kTop = 4;             // how many of its likeliest followers a context keeps in order

  // A context that different tokens followed.
  struct Node {
    int32_t total = 0;
    int32_t tops = 0;
    int32_t top[kTop];  // the most frequent followers, best first; the newer first among equals
  };

  // The known contexts that a text ends with: nodes[m - 1] is for its last m tokens; leaf is the newest position of the
  // leaf that the next longer one ends in, or -1.
  struct Contexts {
    int count = 0;
    int32_t nodes[kDepth];
    int32_t leaf = -1;
  };

  ContextTree() : nodes_(1) {}
  void add(int32_t token);  // O(kDepth)
  Contexts contexts(const std::vector<int32_t>& text) const;
  // How many of the last tokens of `text` equal those before `position`, at most `limit`.
  int matched(const std::vector<int32_t>& text, int32_t position, int limit) const;
  const Node& node(int32_t index) const { return nodes_[static_cast<size_t>(index)]; }
  int32_t count(int32_t node, int32_t token) const;
  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
  int32_t token(int32_t position) const { return tokens_[static_cast<size_t>(position)]; }
  // The position before this one in the same leaf, or -1.
  int32_t older(int32_t position) const { return older_[static_cast<size_t>(position)]; }

 private:
  static uint64_t key(int32_t node, int32_t token) { return uint64_t{static_cast<uint32_t>(node)} << 32 | static_cast<uint32_t>(token); }
  int32_t split(int32_t newest, int depth);
  void record(int32_t node, int32_t token);

  std::vector<int32_t> tokens_, older_;
  std::vector<Node> nodes_;
  Table children_;  // (node, token before the context) -> the longer context: a leaf's newest position, or ~node
  Table counts_;    // (node, token that followed) -> how often
};

// One guess of what stands at a place of the offer, its chance once the guesses before it there have failed, and the
// features that decide the chance.
struct Guess {
  int32_t token;
  double chance;
  int32_t features[4];
};

// A tree of the likeliest continuations, parents first.
struct SuffixOffer {
  // Layout of the features: who knows it (the text itself, the shared history, both), its rank among the guesses, the
  // class of the matched length, and the evidence. Evidence: seen once, twice or more and never anything else
  // (determined); or one of several, seen 1, 2, 3-5 or more times, in the longest known context (counted) or in a
  // shorter one after what the longer ones say was set aside (left over).
  static constexpr int kWidth = 3, kOwn = 0, kShared = 1, kBoth = 2, kRank = 3, kLength = kRank + kWidth, kLengths = 10,
                       kDetermined = kLength + kLengths, kCounted = kDetermined + 3, kLeftOver = kCounted + 4, kFeatures = kLeftOver + 4;

  std::vector<int32_t> tokens, parents;
  std::vector<float> chances;
  std::vector<std::vector<Guess>> places;  // at the root, behind node 0, ...: where the search looked

  // Searches both histories for what may follow the text that `own` holds.
  SuffixOffer(const ContextTree& own, const ContextTree& shared, int budget, const std::vector<double>& weights, double luck);

  // The node that `token` led to from a place (-1 is the root), or -1.
  int32_t child(int32_t parent, int32_t token) const;
};

}  // namespace paceline

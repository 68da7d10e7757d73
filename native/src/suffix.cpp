#include "suffix.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <tuple>

namespace paceline {
namespace {

constexpr int kReach = 32;       // matches are measured up to this many tokens
constexpr double kLeast = 0.01;  // the n-th node must be reached and right with n times this chance: no row is for free
constexpr int kSure = 8;         // a single earlier occurrence in the request itself that matches this far speaks alone
constexpr size_t kSplit = 64;    // most positions that are handed down when a leaf splits; older ones stay counted

using Text = std::vector<int32_t>;

// As calibration.length_class: 0 to 4 alone, then ever wider, 24 and more together.
int32_t length_class(int length) {
  return length < 6 ? std::min(length, 5) : length < 7 ? 5 : length < 10 ? 6 : length < 16 ? 7 : length < 24 ? 8 : 9;
}

double logistic(double log_odds) { return 1.0 / (1.0 + std::exp(-log_odds)); }

// What a history says of one token: the length of its context, and how strong the evidence is, as features.
struct Clue {
  int32_t token, length, evidence;
};

struct Known {
  std::vector<Clue> clues;  // longest context first
  int32_t leaf;             // newest position of the leaf that the text ends in, or -1
  int matched = 0;          // how far the text agrees with what stands before it
};

// What followed `text`: about kWidth tokens.
Known known(const ContextTree& tree, const Text& text) {
  ContextTree::Contexts contexts = tree.contexts(text);
  Known found{{}, contexts.leaf};
  if (found.leaf >= 0) {
    int32_t older = tree.older(found.leaf);
    int times = older < 0 ? 0 : tree.older(older) < 0 ? 1 : 2;
    found.matched = tree.matched(text, found.leaf, kReach);
    found.clues.push_back({tree.token(found.leaf), SuffixOffer::kLength + length_class(found.matched), SuffixOffer::kDetermined + times});
  }
  for (int length = contexts.count; length > 0 && found.clues.size() < SuffixOffer::kWidth; --length) {
    int32_t at = contexts.nodes[length - 1];
    const ContextTree::Node& node = tree.node(at);
    int32_t left = node.total;
    for (const Clue& clue : found.clues) left -= tree.count(at, clue.token);
    if (left == 0) continue;
    int32_t base = left == node.total ? SuffixOffer::kCounted : SuffixOffer::kLeftOver;
    for (int i = 0; i < node.tops; ++i) {
      int32_t token = node.top[i];
      if (std::any_of(found.clues.begin(), found.clues.end(), [&](const Clue& clue) { return clue.token == token; })) continue;
      int32_t times = tree.count(at, token);
      found.clues.push_back({token, SuffixOffer::kLength + length_class(length), base + (times < 3 ? times - 1 : times < 6 ? 2 : 3)});
    }
  }
  return found;
}

// Where the text goes on that is being copied; nowhere when it is not that plain.
struct Trail {
  int32_t position = -1;
  int matched = 0;
};

struct Candidate {
  double path;
  int32_t serial, parent;
  double chance;
  int32_t token;
  Text text;  // before it
  Trail trail;
  // The likeliest first, then the one found first.
  bool operator<(const Candidate& other) const { return path < other.path || (path == other.path && serial > other.serial); }
};

class Search {
 public:
  Search(const ContextTree& own, const ContextTree& shared, const std::vector<double>& weights, double luck)
      : own_(own), shared_(shared), weights_(weights), luck_(luck) {}

  // The guesses for the token after `text`, surest first. Moves the trail on, or finds one.
  std::vector<Guess> guess(const Text& text, Trail& trail) const {
    if (trail.position >= 0) return copy(trail);
    Known mine = known(own_, text);
    if (mine.matched >= kSure && own_.older(mine.leaf) < 0) {
      trail = {mine.leaf, mine.matched};
      return copy(trail);
    }
    return rank(together(mine, known(shared_, text)));
  }

 private:
  double weight(int32_t feature) const { return weights_[static_cast<size_t>(feature)]; }

  // What stands on the trail: the only place where so long a match occurred, so nothing competes.
  std::vector<Guess> copy(Trail& trail) const {
    Guess guess{own_.token(trail.position), 0.0,
                {SuffixOffer::kOwn, SuffixOffer::kLength + length_class(trail.matched), SuffixOffer::kDetermined, SuffixOffer::kRank}};
    double sum = luck_;
    for (int32_t feature : guess.features) sum += weight(feature);
    guess.chance = logistic(sum);
    trail = trail.position + 1 < own_.size() ? Trail{trail.position + 1, trail.matched + 1} : Trail{};
    return {guess};
  }

  // What the longer context says of a token counts where both histories know it.
  static std::vector<Guess> together(const Known& mine, const Known& others) {
    std::vector<Guess> found;
    for (const Clue& clue : mine.clues) found.push_back({clue.token, 0.0, {SuffixOffer::kOwn, clue.length, clue.evidence, 0}});
    for (const Clue& clue : others.clues) {
      auto same = std::find_if(found.begin(), found.end(), [&](const Guess& guess) { return guess.token == clue.token; });
      if (same == found.end()) {
        found.push_back({clue.token, 0.0, {SuffixOffer::kShared, clue.length, clue.evidence, 0}});
        continue;
      }
      same->features[0] = SuffixOffer::kBoth;
      if (same->features[1] < clue.length) same->features[1] = clue.length, same->features[2] = clue.evidence;
    }
    return found;
  }

  // Prediction by partial matching (Cleary and Witten 1984): the surest guess speaks first, and each further one gets
  // its part of what those before it leave over.
  std::vector<Guess> rank(std::vector<Guess> guesses) const {
    for (Guess& guess : guesses) guess.chance = weight(guess.features[0]) + weight(guess.features[1]) + weight(guess.features[2]);
    std::sort(guesses.begin(), guesses.end(),
              [](const Guess& a, const Guess& b) { return std::tie(a.chance, a.token) > std::tie(b.chance, b.token); });
    if (guesses.size() > SuffixOffer::kWidth) guesses.resize(SuffixOffer::kWidth);
    int32_t rank = SuffixOffer::kRank;
    for (Guess& guess : guesses) {
      guess.chance = 1.0 / (1.0 + std::exp(-guess.chance - weight(rank) - luck_));
      guess.features[3] = rank++;
    }
    return guesses;
  }

  const ContextTree &own_, &shared_;
  const std::vector<double>& weights_;
  double luck_;
};

}  // namespace

size_t Table::place(uint64_t key) const {
  size_t mask = entries_.size() - 1;
  uint64_t mixed = key * 0x9E3779B97F4A7C15u;  // Fibonacci hashing (Knuth): the upper bits depend on all of the key
  size_t at = static_cast<size_t>(mixed >> 32) & mask;
  while (entries_[at].key != kFree && entries_[at].key != key) at = (at + 1) & mask;
  return at;
}

const int32_t* Table::find(uint64_t key) const {
  const Entry& entry = entries_[place(key)];
  return entry.key == key ? &entry.value : nullptr;
}

int32_t& Table::at(uint64_t key, int32_t start) {
  if (2 * (used_ + 1) > entries_.size()) grow();
  Entry& entry = entries_[place(key)];
  if (entry.key == kFree) {
    entry = {key, start};
    ++used_;
  }
  return entry.value;
}

void Table::grow() {
  std::vector<Entry> old(2 * entries_.size());
  old.swap(entries_);
  for (const Entry& entry : old)
    if (entry.key != kFree) entries_[place(entry.key)] = entry;
}

void ContextTree::add(int32_t token) {
  auto i = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
  older_.push_back(-1);
  if (token == kSeparator) return;
  int32_t node = 0;
  for (int depth = 1; depth <= std::min(kDepth, i); ++depth) {
    int32_t before = this->token(i - depth);
    if (before == kSeparator) return;
    const int32_t* known = children_.find(key(node, before));
    if (!known) {
      children_.at(key(node, before), i);
      return;
    }
    int32_t child = *known;
    if (child >= 0) {
      if (this->token(child) == token) {
        older_[static_cast<size_t>(i)] = child;
        children_.at(key(node, before), i) = i;
        return;
      }
      int32_t made = ~split(child, depth);
      children_.at(key(node, before), made) = made;
      child = made;
    }
    node = ~child;
    record(node, token);
  }
}

// Makes a node of a leaf whose context is `depth` tokens long.
int32_t ContextTree::split(int32_t newest, int depth) {
  Text positions;
  for (int32_t p = newest; p >= 0; p = older(p)) positions.push_back(p);
  auto index = static_cast<int32_t>(nodes_.size());
  Node& node = nodes_.emplace_back();
  node.total = static_cast<int32_t>(positions.size());
  node.top[node.tops++] = token(newest);
  counts_.at(key(index, token(newest)), node.total);
  if (depth == kDepth) return index;
  for (size_t k = std::min(kSplit, positions.size()); k-- > 0;) {
    int32_t p = positions[k], at = p - depth - 1;
    if (at < 0 || token(at) == kSeparator) continue;
    int32_t& child = children_.at(key(index, token(at)), -1);
    older_[static_cast<size_t>(p)] = child;
    child = p;
  }
  return index;
}

void ContextTree::record(int32_t index, int32_t token) {
  int32_t count = ++counts_.at(key(index, token), 0);
  Node& node = nodes_[static_cast<size_t>(index)];
  ++node.total;
  if (node.tops && node.top[0] == token) return;
  int at = static_cast<int>(std::find(node.top, node.top + node.tops, token) - node.top);
  if (at == kTop) {
    if (this->count(index, node.top[kTop - 1]) > count) return;
    at = kTop - 1;
  } else if (at == node.tops) {
    ++node.tops;
  }
  for (; at && this->count(index, node.top[at - 1]) <= count; --at) node.top[at] = node.top[at - 1];
  node.top[at] = token;
}

ContextTree::Contexts ContextTree::contexts(const Text& text) const {
  Contexts found;
  int32_t node = 0;
  for (int depth = 0; depth < kDepth && depth < static_cast<int>(text.size()); ++depth) {
    const int32_t* child = children_.find(key(node, text[text.size() - 1 - static_cast<size_t>(depth)]));
    if (!child) return found;
    if (*child >= 0) {
      found.leaf = *child;
      return found;
    }
    node = ~*child;
    found.nodes[found.count++] = node;
  }
  return found;
}

int ContextTree::matched(const Text& text, int32_t position, int limit) const {
  limit = std::min({limit, position, static_cast<int>(text.size())});
  int length = 0;
  while (length < limit && token(position - length - 1) == text[text.size() - 1 - static_cast<size_t>(length)]) ++length;
  return length;
}

int32_t ContextTree::count(int32_t node, int32_t token) const {
  const int32_t* count = counts_.find(key(node, token));
  return count ? *count : 0;
}

SuffixOffer::SuffixOffer(const ContextTree& own, const ContextTree& shared, int budget, const std::vector<double>& weights, double luck) {
  Search search(own, shared, weights, luck);
  std::priority_queue<Candidate> queue;
  Candidate at{1.0, 0, -1, 1.0, 0, {}, {}};
  for (int32_t p = std::max(0, own.size() - kReach); p < own.size(); ++p) at.text.push_back(own.token(p));
  int32_t serial = 0;
  for (int size = 0; size < budget; ++size) {
    const std::vector<Guess>& guesses = places.emplace_back(search.guess(at.text, at.trail));
    double least = kLeast * (size + 1), left = at.path;
    for (const Guess& guess : guesses) {
      double reached = left * guess.chance;
      left -= reached;
      if (reached >= least) queue.push({reached, ++serial, size - 1, reached / at.path, guess.token, at.text, at.trail});
    }
    if (queue.empty() || queue.top().path < least) return;
    at = queue.top();
    queue.pop();
    tokens.push_back(at.token);
    parents.push_back(at.parent);
    chances.push_back(static_cast<float>(at.chance));
    at.text.push_back(at.token);
  }
}

int32_t SuffixOffer::child(int32_t parent, int32_t token) const {
  for (size_t i = 0; i < tokens.size(); ++i)
    if (parents[i] == parent && tokens[i] == token) return static_cast<int32_t>(i);
  return -1;
}

}  // namespace paceline

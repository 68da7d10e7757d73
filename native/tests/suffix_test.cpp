// The context tree against counting, and the shape of what the search finds. Python's tests compare the search itself.
#include "suffix.h"

#include <algorithm>
#include <map>
#include <random>

#include "check.h"

using paceline::ContextTree;
using paceline::SuffixOffer;
using Text = std::vector<int32_t>;

namespace {

// Positions whose token followed the last `length` tokens of `text`, with no separator in between or at it.
Text followers(const Text& tokens, const Text& text, size_t length) {
  Text found;
  for (size_t i = length; i < tokens.size(); ++i)
    if (tokens[i] >= 0 && std::equal(text.end() - static_cast<std::ptrdiff_t>(length), text.end(), tokens.begin() + static_cast<std::ptrdiff_t>(i - length)))
      found.push_back(static_cast<int32_t>(i));
  return found;
}

void check_contexts(const ContextTree& tree, const Text& tokens, const Text& text) {
  ContextTree::Contexts found = tree.contexts(text);
  for (int length = 1; length <= found.count; ++length) {
    std::map<int32_t, int32_t> counts;
    Text places = followers(tokens, text, static_cast<size_t>(length));
    for (int32_t p : places) ++counts[tokens[static_cast<size_t>(p)]];
    int32_t at = found.nodes[length - 1], last = tree.node(at).total;
    CHECK(last == static_cast<int32_t>(places.size()));
    for (auto [token, count] : counts) CHECK(tree.count(at, token) == count);
    CHECK(tree.node(at).tops == std::min<int>(ContextTree::kTop, static_cast<int>(counts.size())));
    for (int i = 0; i < tree.node(at).tops; ++i) {
      CHECK(counts[tree.node(at).top[i]] <= last);
      last = counts[tree.node(at).top[i]];
    }
  }
  if (found.count >= ContextTree::kDepth || found.count >= static_cast<int>(text.size())) return;
  Text places = followers(tokens, text, static_cast<size_t>(found.count + 1));
  CHECK(found.leaf == (places.empty() ? -1 : places.back()));
  for (int32_t p = found.leaf; p >= 0; p = tree.older(p)) {
    CHECK(p == places.back());
    places.pop_back();
  }
  CHECK(places.empty());
}

void check_offer(const SuffixOffer& offer, int budget) {
  CHECK(static_cast<int>(offer.tokens.size()) <= budget);
  for (size_t i = 0; i < offer.tokens.size(); ++i) {
    CHECK(offer.parents[i] >= -1 && offer.parents[i] < static_cast<int32_t>(i));
    CHECK(offer.chances[i] > 0.0f && offer.chances[i] <= 1.0f);
    CHECK(offer.child(offer.parents[i], offer.tokens[i]) == static_cast<int32_t>(i));  // siblings differ
  }
}

}  // namespace

int main() {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    Text tokens, shared;
    ContextTree tree, other;
    for (int i = draw(0, 90), most = draw(0, 5); i > 0; --i) {
      tokens.push_back(draw(-1, most));
      tree.add(tokens.back());
      other.add(draw(-1, most));
      Text text;
      for (int k = draw(1, 24); k > 0; --k) text.push_back(draw(0, most));
      check_contexts(tree, tokens, text);
    }
    std::vector<double> weights;
    for (int i = 0; i < SuffixOffer::kFeatures; ++i) weights.push_back(std::normal_distribution<double>()(random));
    for (int budget : {0, 1, 16}) check_offer(SuffixOffer(tree, other, budget, weights, 0.5), budget);
  }
  return paceline::test::result();
}

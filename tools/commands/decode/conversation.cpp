#include "tools/commands/decode/conversation.h"

#include <algorithm>
#include <stdexcept>

#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

Conversation::Conversation(Runner& runner, KeyholeCache cache, AttendSpec spec, BudgetChoice budget,
                           const SamplingOptions& sampling, HeldConversation held, bool built)
    : runner_(runner),
      cache_(std::move(cache)),
      decoder_(runner.decoder(
          cache_, HeldTokens(static_cast<uint32_t>(held.tokens.size()), held.rope_tokens))),
      sequence_(*decoder_, held.tokens),
      spec_(std::move(spec)),
      budget_(budget),
      sampler_(sampling),
      tokens_(std::move(held.tokens)),
      capacity_(cache_.config().max_tokens),
      built_(built) {
  sequence_.set_take_anew([this](std::span<const uint32_t> all) {
    const HiddenProgress answer_stands_in_its_line;
    (void)bring_to(all);
  });
}

void Conversation::check_room(size_t tokens) const {
  if (tokens < capacity_) return;
  throw std::runtime_error("the context of " + format_count(capacity_) +
                           " tokens has no room for " + format_count(tokens) + " and an answer");
}

void Conversation::have_said(std::vector<uint32_t> tokens) {
  tokens_ = std::move(tokens);
  sampler_.forget();
  sampler_.saw(tokens_);
}

Conversation::Taken Conversation::bring_to(std::span<const uint32_t> tokens) {
  Taken taken;
  {
    Progress bar("prompt of " + format_count(tokens.size()) + " tokens");
    taken.work = sequence_.bring_to(tokens, [&bar](double fraction) {
      throw_if_interrupted();
      bar.update(fraction);
    });
  }
  if (taken.work.prefilled > 0) built_ = false;
  if (!built_) taken.build_seconds = apply_spec(cache_, spec_, budget_);
  built_ = true;
  return taken;
}

Conversation::Taken Conversation::take(std::vector<uint32_t> tokens) {
  check_room(tokens.size());
  const Taken taken = bring_to(tokens);
  have_said(std::move(tokens));
  return taken;
}

TurnCost Conversation::take_turn(std::vector<uint32_t> tokens) {
  check_room(tokens.size());
  const TurnCost cost = extend_by_turn(
      runner_, cache_, *decoder_, std::span(tokens).subspan(sequence_.tokens().size()),
      [this](std::span<const uint32_t> some) { (void)sequence_.extend(some); });
  have_said(std::move(tokens));
  return cost;
}

Generator Conversation::answer(const Tokenizer* tokenizer, Stops stops, DecodeState follows) {
  // The answer's last token is not taken, so that there is room for one more than the session can hold.
  const auto room = static_cast<uint32_t>(capacity_ - tokens_.size());
  stops.most_tokens = std::min(stops.most_tokens, room);
  return {sequence_, sampler_, tokenizer, std::move(stops), follows};
}

void Conversation::add(const Generator& answer) {
  tokens_.insert(tokens_.end(), answer.tokens().begin(), answer.tokens().end());
}

void Conversation::reset() {
  sequence_.truncate(0);
  sampler_.forget();
  tokens_.clear();
}

void Conversation::save(const std::filesystem::path& path, SavedSession of) {
  const std::vector<uint32_t>& taken = sequence_.tokens();
  const auto same = std::mismatch(taken.begin(), taken.end(), tokens_.begin(), tokens_.end()).first;
  // After an interrupted prompt the session may hold tokens that were not said in the end.
  sequence_.truncate(static_cast<size_t>(same - taken.begin()));
  if (tokens_.empty()) throw std::runtime_error("there is nothing to save yet");
  // A step that failed has left its token in some layers.
  decoder_->truncate(static_cast<uint32_t>(taken.size()));
  of.tokens = tokens_;
  of.taken = static_cast<uint32_t>(taken.size());
  of.rope_tokens = decoder_->rope_tokens();
  of.sampler = sampler_.state();
  save_session(path, cache_, of);
}

}  // namespace keyhole::tools

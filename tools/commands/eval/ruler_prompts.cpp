#include "tools/commands/eval/ruler_prompts.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/files/json.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

/// A conversation with the beginning of the answer behind it.
ChatText with_prefix(ChatText text, const std::string& prefix) {
  const size_t begin = text.text.size();
  text.text += prefix;
  if (!prefix.empty()) text.literal.push_back({begin, text.text.size()});
  return text;
}

}  // namespace

RulerPrompts::RulerPrompts(const EvalOptions& options, const Tokenizer& tokenizer)
    : options_(options), tokenizer_(tokenizer) {
  if (options.chat && options.ruler.bytes_per_token == 0) chat_ = load_chat(options.model);
  for (const std::string& path : options.ruler.data) {
    ruler::QaData data = ruler::parse_qa(read_text_file(path), path);
    (data.is_squad ? squad_ : hotpot_qa_) = std::move(data);
  }
  for (const ruler::TaskInfo* task : tasks_of(options.ruler)) {
    const bool squad = task->needs == ruler::Needs::squad;
    const bool missing =
        (squad && !squad_) || (task->needs == ruler::Needs::hotpot_qa && !hotpot_qa_);
    if (missing) {
      throw UsageError("--ruler " + std::string(task->name) + " needs --data FILE, a file of " +
                       (squad ? "SQuAD" : "HotpotQA"));
    }
    if (task->needs == ruler::Needs::prose && prose_.empty()) prose_ = haystack_of(options.task);
  }
}

std::unique_ptr<ruler::Samples> RulerPrompts::samples(const ruler::TaskInfo& task,
                                                      uint32_t length) const {
  const auto qa_of = [](const std::optional<ruler::QaData>& data) {
    return data ? &*data : nullptr;
  };
  ruler::TaskSetup setup;
  setup.length = length;
  setup.samples = options_.ruler.samples;
  setup.seed = options_.task.seed;
  setup.chat = options_.chat;
  setup.prose = prose_;
  setup.qa = qa_of(task.needs == ruler::Needs::squad ? squad_ : hotpot_qa_);
  setup.count_text = [this](const std::string& text) { return count(text); };
  try {
    return std::make_unique<ruler::Samples>(
        task.make(setup), length - std::min(length, task.answer_tokens),
        [this](const ruler::Sample& sample) { return count(sample); });
  } catch (const UsageError& error) {
    throw UsageError("--ruler " + std::string(task.name) + " at --length " + format_count(length) +
                     ": " + error.what());
  }
}

size_t RulerPrompts::count(const std::string& text) const {
  const double bytes = options_.ruler.bytes_per_token;
  if (bytes == 0) return tokenizer_.encode(text).size();
  return static_cast<size_t>(std::ceil(static_cast<double>(text.size()) / bytes));
}

size_t RulerPrompts::count(const ruler::Sample& sample) const {
  if (options_.ruler.bytes_per_token > 0) {
    std::string text = sample.prompt + sample.prefix;
    const std::string* right = &sample.answer;
    for (const ruler::FollowUp& next : sample.follow_ups) {
      text += *right + next.prompt + next.prefix;
      right = &next.answer;
    }
    return count(text);
  }
  size_t tokens = 0;
  for (const std::vector<uint32_t>& turn : turns(sample)) tokens += turn.size();
  return tokens;
}

nlohmann::ordered_json RulerPrompts::to_json(const ruler::TaskInfo& task,
                                             const ruler::Sample& sample) {
  nlohmann::ordered_json json = {{"task", task.name},
                                 {"answer_tokens", task.answer_tokens},
                                 {"scoring", ruler::name_of(task.scoring)},
                                 {"one_line", task.one_line},
                                 {"prompt", sample.prompt},
                                 {"prefix", sample.prefix},
                                 {"references", sample.references}};
  const std::string* right = &sample.answer;
  for (const ruler::FollowUp& next : sample.follow_ups) {
    json["follow_ups"].push_back({{"behind", *right},
                                  {"prompt", next.prompt},
                                  {"prefix", next.prefix},
                                  {"references", next.references}});
    right = &next.answer;
  }
  return json;
}

std::vector<uint32_t> RulerPrompts::encode(const ruler::Sample& sample) const {
  if (!chat_) return tokenizer_.encode_prompt(sample.prompt + sample.prefix);
  const ChatMessage message{ChatMessage::Role::user, sample.prompt};
  return with_prefix(chat_->render({&message, 1}), sample.prefix).encode(tokenizer_);
}

std::vector<std::vector<uint32_t>> RulerPrompts::turns(const ruler::Sample& sample) const {
  std::vector<std::vector<uint32_t>> out = {encode(sample)};
  const std::string* right = &sample.answer;
  for (const ruler::FollowUp& next : sample.follow_ups) {
    out.push_back(follow_up(*right, next));
    right = &next.answer;
  }
  return out;
}

std::vector<uint32_t> RulerPrompts::follow_up(const std::string& right,
                                              const ruler::FollowUp& next) const {
  if (next.prompt.empty()) return tokenizer_.encode_inside(right + next.prefix);
  if (!chat_) return tokenizer_.encode_inside(right + "\n" + next.prompt + next.prefix);
  std::vector<uint32_t> tokens = tokenizer_.encode_inside(right);
  const auto append = [&tokens](const std::vector<uint32_t>& more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
  };
  append(tokenizer_.encode(chat_->end_of_answer(), Specials::parsed));
  append(with_prefix(chat_->next_turn(next.prompt), next.prefix).encode(tokenizer_));
  return tokens;
}

std::string RulerPrompts::note() const {
  std::string names;
  for (const ruler::TaskInfo* task : tasks_of(options_.ruler)) {
    if (task->needs != ruler::Needs::prose) continue;
    names += (names.empty() ? "" : ", ") + std::string(task->name);
  }
  if (names.empty()) return "";
  const std::string& file = options_.task.haystack;
  return names + ": the haystack is " + (file.empty() ? "the bundled prose" : file) +
         ", not Paul Graham's essays: these scores are not comparable with published ones";
}

}  // namespace keyhole::tools

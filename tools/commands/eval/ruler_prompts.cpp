#include "tools/commands/eval/ruler_prompts.h"

#include <algorithm>
#include <utility>

#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

RulerPrompts::RulerPrompts(const EvalOptions& options, const Tokenizer& tokenizer)
    : options_(options), tokenizer_(tokenizer) {
  if (options.chat) chat_ = load_chat(options.model);
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
  setup.chat = chat_.has_value();
  setup.prose = prose_;
  setup.qa = qa_of(task.needs == ruler::Needs::squad ? squad_ : hotpot_qa_);
  setup.count_text = [this](const std::string& text) { return tokenizer_.encode(text).size(); };
  try {
    return std::make_unique<ruler::Samples>(
        task.make(setup), length - std::min(length, task.answer_tokens),
        [this](const ruler::Sample& sample) { return encode(sample).size(); });
  } catch (const UsageError& error) {
    throw UsageError("--ruler " + std::string(task.name) + " at --length " + format_count(length) +
                     ": " + error.what());
  }
}

std::vector<uint32_t> RulerPrompts::encode(const ruler::Sample& sample) const {
  if (!chat_) return tokenizer_.encode_prompt(sample.prompt + sample.prefix);
  const ChatMessage message{ChatMessage::Role::user, sample.prompt};
  ChatText text = chat_->render({&message, 1});
  const size_t begin = text.text.size();
  text.text += sample.prefix;
  if (!sample.prefix.empty()) text.literal.push_back({begin, text.text.size()});
  return text.encode(tokenizer_);
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

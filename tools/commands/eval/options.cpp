#include "tools/commands/eval/options.h"

#include "tools/commands/commands.h"
#include "tools/commands/common/gpu_memory.h"
#include "tools/terminal/cli.h"

namespace keyhole::tools {

void add_eval_options(CLI::App& command, EvalOptions& options) {
  add_model_options(command, options.model);
  add_device_option(command, options.model.device);
  add_gpu_memory_option(command, options.model.gpu_memory);
  add_prefill_option(command, options.model.prefill);
  add_chunk_option(command, options.model.chunk);
  add_products_option(command, options.model.products);
  command.add_option("--turn", options.turn,
                     "Tokens of the prompt, the last ones, that come as a later turn: behind the "
                     "build of the last --index, --chunk at once (default: 4096)");
  command
      .add_option("--turn-as", options.turn_as,
                  "How its queries attend: as a prompt's, by the pattern of --prefill; or as "
                  "steps do, by the last --index with the first budget (codes on a GPU up to "
                  "1024 tokens at once, which is then the default of --chunk). A token alone "
                  "attends as steps do in any case. Compare with --index full, whose turn is "
                  "exact")
      ->check(CLI::IsMember({"prompt", "steps"}))
      ->capture_default_str();
  command.add_flag("--check-prefill", options.model.check_prefill,
                   "Compare the prompt's attention with dense attention, layer by layer");
  add_task_options(
      command, options.task,
      {"kv", "passkey", "needles", "variables", "words", "copy", "text", "kld", "drafts", "ruler"});
  add_ruler_options(command, options.ruler);
  add_draft_options(command, options.drafts);
  add_kld_base_options(command, options.base);
  command
      .add_option("--prompt", options.prompt_file,
                  "Text file of --task text, kld and drafts; default: the bundled prose")
      ->type_name("FILE");
  command
      .add_option("--tokens", options.token_file,
                  "File of token ids for --task text, kld and drafts, in place of --prompt")
      ->type_name("FILE");
  command
      .add_option("--bytes", options.bytes,
                  "Tokens, not bytes, of --task text and kld that are decoded and predicted after "
                  "the first "
                  "--length; the bundled model's tokens are bytes")
      ->type_name("TOKENS")
      ->check(CLI::Range(1U, 1U << 24))
      ->capture_default_str();
  command
      .add_option(
          "--bins", options.bins,
          "Equal parts of the --bytes tokens of --task kld, in order, that have a row each: "
          "whether errors grow with what was appended")
      ->type_name("PARTS")
      ->check(CLI::Range(1U, 1U << 10))
      ->capture_default_str();
  command
      .add_option("--questions", options.questions,
                  "Number of questions, of passages to copy, or of prompts of drafts; default: 64 "
                  "of kv and copy, 4 of drafts, 16 of others")
      ->check(CLI::Range(1U, 1U << 20));
  command
      .add_option("--index", options.indexes,
                  "Index spec (keyhole compare --help lists the types), or what indexes are "
                  "compared with: " +
                      ways_help() + "; repeatable; default: exact and auto")
      ->type_name("SPEC");
  command
      .add_option("--k", options.ks,
                  "Keys that one search finds, e.g. 25,50,100: of each query head, with codes of "
                  "the KV head")
      ->delimiter(',')
      ->check(CLI::Range(1U, 1U << 30))
      ->capture_default_str();
  command.add_flag(
      "--chat", options.chat,
      "Ask in the model's chat template, as instruct models are asked; right is an answer that "
      "contains the values");
  command
      .add_option("--answer-tokens", options.answer_tokens,
                  "Tokens of an answer at most, in a chat and of needles, variables and words, "
                  "and of what is decoded by drafts")
      ->check(CLI::Range(1U, 1U << 16))
      ->capture_default_str();
  add_budget_lists(command, options.budgets);
  add_cache_options(command, options.cache);
  add_parallel_options(command, options.cache.parallel);
  add_audit_options(command, options.cache.audit);
  command.add_option("--json", options.json, "Write the results as JSON; - is standard output")
      ->type_name("FILE");
  add_html_option(command, "answers, curves", options.html);
  command.footer(
      examples(
          {"keyhole eval --task kv --length 8192 --questions 64 --index exact --index none "
           "--index flat",
           "keyhole eval --task passkey --length 32k --index exact --index ivf --k 50,100,200",
           "keyhole eval --task kv --length 32k --index ivf:probe=32 --attend topk:100 --attend "
           "scored",
           "keyhole eval --task kv --length 32k --index ivf --tail none --tail second --target "
           "none "
           "--target error=0.05",
           "keyhole eval --task kv --length 32k --index exact --budgets budgets.json",
           "keyhole eval --task copy --length 32k --index exact --index none --index q4_0 --index "
           "ivf",
           "keyhole eval --task text --length 16k --bytes 2000 --index exact --index none --index "
           "ivf",
           "keyhole eval --task kld --length 16k --bytes 1000 --index auto --index codes:k=2,v=2 "
           "--index q4_0",
           "keyhole eval --model DIR --task kld --base llama.kld --chunks 2 --index codes:k=4,v=4",
           "keyhole eval --model DIR --task drafts --draft SMALL_DIR --length 4k --index exact "
           "--index codes:k=2,v=2",
           "keyhole eval --task kld --length 4k --bytes 32768 --bins 8 --index auto --index ivf "
           "--tail second",
           "keyhole eval --task ruler --ruler turns,records,enumerate,mqar --length 8k --chat "
           "--model DIR",
           "keyhole eval --task ruler --ruler niah_multikey_3,vt,cwe --length 8k,16k --samples 50 "
           "--seed 42 --index exact --index auto",
           "keyhole eval --task kv --length 128k --index hnsw:M=32,ef=128 --json result.json"}) +
      "\n\nThe context is run once for all ways to attend (of ruler, each of its prompts). Every "
      "question is answered by\ndecoding steps, which are then truncated away; a text, passages to "
      "copy, and ruler's prompts, in copies of the cache.");
}

}  // namespace keyhole::tools

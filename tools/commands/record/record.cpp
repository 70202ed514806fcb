// keyhole record: runs a model over a prompt and writes its keys, values and queries as a trace.
#include <cstdio>
#include <memory>

#include "tools/commands/commands.h"
#include "tools/commands/common/gpu_memory.h"
#include "tools/commands/common/recording.h"
#include "tools/terminal/cli.h"

namespace keyhole::tools {

void add_record(CLI::App& keyhole) {
  auto options = std::make_shared<RecordOptions>();
  CLI::App* command = keyhole.add_subcommand(
      "record", "Write the keys, values and queries of a prompt as a trace for `keyhole compare`");
  add_model_options(*command, options->model);
  add_device_option(*command, options->model.device);
  add_gpu_memory_option(*command, options->model.gpu_memory);
  add_task_options(*command, options->task);
  command->add_option("--prompt", options->prompt_file, "Text file to run instead of a task")
      ->type_name("FILE");
  command
      ->add_option("--tokens", options->token_file,
                   "File of token ids, for models without a tokenizer.json")
      ->type_name("FILE");
  command->add_flag("--chat", options->chat,
                    "The task as a conversation in the model's chat template");
  command->add_option("--out", options->out, "The trace to write")->required()->type_name("FILE");
  command
      ->add_option(
          "--layers", options->layers,
          "Layers to record, counted without those that have a sliding window; default: all")
      ->delimiter(',')
      ->type_name("L,...");
  command
      ->add_option("--queries", options->queries,
                   "Decode-time queries: the last positions (of a task: its questions and answers)")
      ->check(CLI::Range(1U, 1U << 20))
      ->capture_default_str();
  command
      ->add_option("--training", options->training,
                   "Earlier positions whose queries may guide an index, evenly spread")
      ->check(CLI::Range(0U, 1U << 24))
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "How K and V are written: f16 or f32")
      ->check(CLI::IsMember({"f16", "f32"}))
      ->capture_default_str();
  command->add_option("--threads", options->threads, "Threads; 0: one per core")
      ->capture_default_str();
  command->footer(examples(
      {"keyhole record --task kv --length 32k --seed 7 --out kv32k.safetensors",
       "keyhole record --model DIR --prompt book.txt --layers 4,5 --out book.safetensors"}));
  command->callback([options] { std::printf("%s\n", record_trace(*options).c_str()); });
}

}  // namespace keyhole::tools

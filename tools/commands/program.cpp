#include "tools/commands/program.h"

#include <keyhole/keyhole.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>

#include "tools/commands/commands.h"
#include "tools/llama/blas.h"
#include "tools/mpi/ranks.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/standard_streams.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

namespace {

constexpr const char* kExitCodes =
    "Exit codes:\n"
    "    0  success, also with warnings\n"
    "    1  the work failed: a file, the memory, the device, the library\n"
    "    2  the command line is wrong\n"
    "  130  interrupted (Ctrl-C); 143 by SIGTERM, 129 by SIGHUP\n\n"
    "Results go to standard output; errors and progress to standard error, progress only on a "
    "terminal.\n"
    "Colours are shown on a terminal, unless NO_COLOR is set or TERM is dumb.";

void add_commands(CLI::App& keyhole) {
  add_decode(keyhole);
  add_eval(keyhole);
  add_record(keyhole);
  add_compare(keyhole);
  add_train_saap(keyhole);
  add_calibrate(keyhole);
  add_heads(keyhole);
  add_plan(keyhole);
  add_prefill(keyhole);
  add_bench_step(keyhole);
}

int report(const std::string& text, ExitCode code) {
  const Style style = style_of(stderr);
  // An error of the command line is the same on all ranks.
  if (code == kExitFailure) report_of_rank(text);
  std::fprintf(stderr, "keyhole: %s %s\n", tinted("error:", Tint::red, style).c_str(),
               text.c_str());
  return code;
}

// CLI11 would only say that a subcommand is missing.
void refuse_unknown_command(CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string known;
  for (const CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    if (command->get_name() == argv[1]) return;
    known += (known.empty() ? "" : ", ") + command->get_name();
  }
  throw UsageError("there is no command \"" + std::string(argv[1]) + "\"; the commands are " +
                   known);
}

int run(int argc, char** argv) {
  CLI::App app(
      "Decodes with a long context whose KV cache lies in host memory behind a vector index.");
  app.name("keyhole");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("keyhole ") + keyhole_version(),
                       "Print the version and exit");
  app.footer(
      examples({"keyhole plan --model MODEL --context 128k --index flat",
                "keyhole decode --model MODEL --task kv --length 8192 --generate 32 --index flat",
                "keyhole eval --model MODEL --task kv --length 8192 --questions 64 --index flat",
                "keyhole record --model MODEL --task kv --length 8192 --out trace.safetensors",
                "keyhole compare --trace trace.safetensors --index flat --index hnsw:M=32,ef=128",
                "keyhole calibrate --length 32k --error 0.05 --out budgets.json",
                "keyhole heads --length 8k --html heads.html", "keyhole compare --help"}) +
      "\n\n" + kExitCodes);
  add_commands(app);

  try {
    join_ranks(argc, argv);
    refuse_unknown_command(app, argc, argv);
    try {
      app.parse(argc, argv);
    } catch (const CLI::Success& e) {  // --help, --version
      if (app.exit(e) != 0) return kExitFailure;
    }
    check_output_arrived();
  } catch (const CLI::ParseError& e) {
    return report(std::string(e.what()) + " (see " +
                      (app.get_subcommands().empty()
                           ? "keyhole"
                           : "keyhole " + app.get_subcommands().front()->get_name()) +
                      " --help)",
                  kExitUsage);
  } catch (const UsageError& e) {
    return report(e.what(), kExitUsage);
  } catch (const Interrupted&) {
    std::fputs("keyhole: interrupted\n", stderr);
    return interrupted_exit_code();
  } catch (const std::bad_alloc&) {
    return report("out of memory", kExitFailure);
  } catch (const std::exception& e) {
    // A callback that the user interrupted may see the library's "cancelled" first.
    if (interrupted()) return interrupted_exit_code();
    return report(e.what(), kExitFailure);
  }
  return kExitOk;
}

}  // namespace

int run_program(int argc, char** argv) {
  open_missing_streams();
  restart_with_matching_blas_kernels(argv);
  handle_interrupts();
  const int code = run(argc, argv);
  leave_ranks(code);
  if (blas_threads_lack_memory()) {  // exit() would wait for them
    std::fflush(nullptr);
    std::_Exit(code);
  }
  return code;
}

}  // namespace keyhole::tools

#include "tools/commands/decode/interactive.h"

#include <unistd.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

#include "tools/commands/decode/show.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/line_reader.h"
#include "tools/terminal/style.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

constexpr const char* kHelp =
    "A line is what you say; one that ends in \\ goes on in the next. A line that begins with // "
    "sends one\n"
    "that begins with /. Ctrl-C ends the answer, Ctrl-D the program.\n"
    "  /save FILE   write the session, for --load-session\n"
    "  /stats       tokens, speed and memory\n"
    "  /reset       forget everything that was said\n"
    "  /quit        end\n"
    "  /help        this text\n";

class Dialogue {
 public:
  Dialogue(Conversation& conversation, const Tokenizer& tokenizer, const Turns& turns,
           const InteractiveOptions& options)
      : conversation_(conversation),
        tokenizer_(tokenizer),
        turns_(turns),
        options_(options),
        terminal_(isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0) {}

  void run() {
    if (terminal_) show("/help tells what can be said beside text\n");
    if (options_.answer_first) {
      guarded([this] { answer(); });
    }
    std::string line;
    std::string said;
    while (true) {
      if (terminal_) show(said.empty() ? "> " : ". ");
      const LineReader::Event event = input_.read(line);
      if (event == LineReader::Event::interrupted) {
        forget_interrupt();
        if (!terminal_ || interrupted()) throw Interrupted{};
        said.clear();
        show("\n(Ctrl-D or /quit ends)\n");
        continue;
      }
      if (event == LineReader::Event::end) break;
      if (line.ends_with('\\')) {
        said += line.substr(0, line.size() - 1) + "\n";
        continue;
      }
      said += line;
      const std::string turn = std::exchange(said, "");
      if (turn == "/quit") return;
      take(turn);
    }
    if (!said.empty()) take(said);
    if (terminal_) show("\n");
  }

 private:
  void take(const std::string& turn) {
    guarded([&] {
      if (turn.starts_with("/") && !turn.starts_with("//")) return command(turn);
      if (turn.empty()) return;
      const std::string said = turn.starts_with("//") ? turn.substr(1) : turn;
      taken_ = conversation_.take(turns_.with(conversation_.tokens(), said));
      answer();
    });
  }

  /// Makes a turn and shows its error where it fails: on a terminal the conversation goes on.
  template <class Turn>
  void guarded(const Turn& turn) {
    try {
      turn();
    } catch (const Interrupted&) {
      forget_interrupt();
      if (!terminal_ || interrupted()) throw;
      show("\n(interrupted: this was not taken in)\n");
    } catch (const std::exception& error) {
      if (!terminal_) throw;
      const Style style = style_of(stderr);
      std::fprintf(stderr, "%s %s\n", tinted("error:", Tint::red, style).c_str(), error.what());
    }
  }

  void answer() {
    conversation_.cache().reset_statistics();
    conversation_.decoder().reset_times();
    Generator generator = conversation_.answer(&tokenizer_, options_.stops, turns_.answer_state());
    const Clock::time_point start = Clock::now();
    try {
      while (const auto piece = generator.next()) {
        show(piece->text);
        if (!interrupted()) continue;
        forget_interrupt();
        show(generator.give_up());
        if (terminal_) show(" (interrupted)");
        break;
      }
    } catch (...) {
      // What was answered before the failure has been said.
      finish(generator, start);
      throw;
    }
    finish(generator, start);
  }

  void finish(const Generator& generator, Clock::time_point start) {
    show("\n");
    answered_ = generator.tokens().size();
    stop_ = generator.reason();
    seconds_ = seconds_since(start);
    conversation_.add(generator);
  }

  void command(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space);
    const std::string rest = space == std::string::npos ? "" : line.substr(space + 1);
    if (name == "/help") {
      show(kHelp);
    } else if (name == "/reset") {
      conversation_.reset();
      if (terminal_) show("(everything is forgotten)\n");
    } else if (name == "/stats") {
      show(statistics());
    } else if (name == "/save") {
      if (rest.empty()) throw std::runtime_error("/save FILE: the file is missing");
      conversation_.save(rest, options_.about);
      show("(" + rest + ": " + format_count(conversation_.tokens().size()) + " tokens)\n");
    } else {
      throw std::runtime_error(name +
                               " is no command; allowed: /help, /reset, /save FILE, /stats, "
                               "/quit, and // for a text that begins with /");
    }
  }

  std::string statistics() {
    const keyhole_statistics s = conversation_.cache().statistics();
    std::string text = format_count(conversation_.tokens().size()) + " of " +
                       format_count(conversation_.capacity()) + " tokens; " +
                       format_bytes(s.host_bytes) + " of host memory, " +
                       format_bytes(s.device_bytes) + " of sink, window and codes on " + s.device +
                       "\n";
    if (answered_ == 0) return text;
    const Sequence::Work& work = taken_.work;
    text += "last prompt: " + format_count(work.reused) + " tokens reused, " +
            format_count(work.prefilled + work.stepped) + " taken in " +
            format_duration(work.seconds) + "; answer: " + format_count(answered_) + " tokens, " +
            format_number(static_cast<double>(answered_) / seconds_) + " tokens/s, ended by " +
            (stop_ == StopReason::none ? "Ctrl-C" : to_text(stop_)) + "\n";
    return text;
  }

  Conversation& conversation_;
  const Tokenizer& tokenizer_;
  const Turns& turns_;
  const InteractiveOptions& options_;
  const bool terminal_;
  LineReader input_{STDIN_FILENO};
  Conversation::Taken taken_;
  size_t answered_ = 0;
  StopReason stop_ = StopReason::none;
  double seconds_ = 0.0;
};

}  // namespace

void interact(Conversation& conversation, const Tokenizer& tokenizer, const Turns& turns,
              const InteractiveOptions& options) {
  Dialogue(conversation, tokenizer, turns, options).run();
}

}  // namespace keyhole::tools

#include "tools/commands/bench_step/index_build.h"

#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"

namespace keyhole::tools {
namespace {

struct BuildBar {
  Progress bar;
  static int32_t callback(void* user, double fraction, const char* /*what*/) {
    static_cast<BuildBar*>(user)->bar.update(fraction);
    return interrupted() ? 1 : 0;
  }
};

}  // namespace

double build_indexes(const StepRanks& ranks, const Session& session, const std::string* index,
                     const BudgetChoice& budget) {
  const Clock::time_point start = Clock::now();
  ranks.together([&] {
    if (index != nullptr) check(keyhole_session_set_index(session.get(), index->c_str()));
    const keyhole_budget values = budget.budget();
    check(keyhole_session_set_budget(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &values));
    BuildBar bar{Progress("build")};
    const keyhole_status status = keyhole_session_build(session.get(), BuildBar::callback, &bar);
    throw_if_interrupted();
    check(status);
  });
  return seconds_since(start);
}

BudgetChoice without_partitions(const BudgetChoice& first) {
  BudgetChoice choice;
  choice.attend = first.attend;
  if (choice.attend.mode == KEYHOLE_ATTEND_NONE) choice.attend.mode = KEYHOLE_ATTEND_TOPK;
  return choice;
}

}  // namespace keyhole::tools

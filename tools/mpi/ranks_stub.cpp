// Without MPI a process is alone; --parallel says what to install where a cache is made.
#include "tools/mpi/ranks.h"

namespace keyhole::tools {

const Ranks& ranks() {
  static const Ranks alone;
  return alone;
}

keyhole_communicator* device_communicator(bool /*on_device*/) { return nullptr; }
bool has_mpi() { return false; }
void join_ranks(int /*argc*/, char** /*argv*/) {}
void leave_ranks(int /*exit_code*/) {}
void report_of_rank(const std::string& /*text*/) {}

}  // namespace keyhole::tools

// The keyhole command.
#include "tools/commands/program.h"

int main(int argc, char** argv) { return keyhole::tools::run_program(argc, argv); }

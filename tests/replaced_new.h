// Tells the tests of every allocation of a program that links replaced_new.cpp, whose operator new it replaces.
#pragma once

namespace keyhole::test {

/// Calls `called` before each allocation of the program, on its thread, from now on; it may throw std::bad_alloc.
/// Each source makes one of these before main; what one counts or lets fail does not concern the others as long as
/// their tests do not run.
struct BeforeAllocation {
  explicit BeforeAllocation(void (*called)());
};

}  // namespace keyhole::test

// Operator new of a program that links replaced_new.cpp tells the tests of every allocation.
#pragma once

namespace keyhole::test {

/// `called` is called before each allocation of the program, on its thread, from now on; it may throw std::bad_alloc. Sources
/// make one each, before main: what one counts or lets fail is no matter of the others as long as their tests do not run.
struct BeforeAllocation {
  explicit BeforeAllocation(void (*called)());
};

}  // namespace keyhole::test

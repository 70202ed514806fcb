// Internal to cpu/: the tables that the level units define and what they share.
#pragma once

#include "cpu/kernels.h"

#if defined(__x86_64__)
#define KEYHOLE_X86_LEVELS 1
#endif

namespace keyhole::cpu {

extern const Kernels kScalarKernels;
#ifdef KEYHOLE_X86_LEVELS
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512VnniKernels;
#endif

/// The same state as Kernels::attend, all sums in double. Attend kernels fall back to it when their fp32
/// sums overflowed (|q.k| or sums of V near 3e38), so that finite inputs never give Inf or NaN.
void attend_in_double(const AttendArgs& args, DType dtype);

}  // namespace keyhole::cpu

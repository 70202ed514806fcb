// The meaning of the indexes "auto" and "exact", which are no types.
//
// "exact" is the mode in which every token is attended, and a type that builds nothing.
//
// "auto": on a CUDA device it is codes of all offloaded rows in the device's memory, of 4 bits or, where more layers
// then have room there, of 2 (code_plan.h says which layers). Of 64 kv questions at 128k these answered 59 and 58,
// exact attention 59; 1 bit answered 22, so it is no default (bench/RESULTS.md). They are in no lists of near rows
// there (kAutoTakesLists of list_gain.h). On the host it is codes of 4 bits in lists, from 8,192 offloaded tokens on;
// their steps read a quarter of the bytes of K and V.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/plan/config.h"

namespace keyhole::runtime {

inline constexpr std::string_view kAutoIndex = "auto";
inline constexpr std::string_view kExactIndex = "exact";
/// The type that it stands for.
inline constexpr std::string_view kExactType = "flat";

/// Checks the spec of a session's index, which is not one of these two any more: as index::check_spec(), but names them
/// as allowed.
void check_index(std::string_view spec);

/// Throws Error(invalid_argument) where an index of the spec undoes RoPE and the model is said to have none.
void check_undone(std::string_view spec, bool has_rope);

/// The budget with codes standing for unread rows, for use where "auto" means codes. It is unchanged if it asks for
/// partitions or for every key that a search scores, and if its init function made it (see completed()).
[[nodiscard]] Budget with_code_tail(Budget budget);

/// Throws Error(invalid_argument) where a budget has no tail beside the codes `spec`, which "auto" stands for, because
/// codes cannot stand for what it does not read.
void check_code_tail(const Budget& budget, std::string_view spec);

/// Where `spec` is "auto", replaces it by the spec that it means in a session of these params (whose own index and
/// budget do not matter, but whose dense layers do), and lets codes stand for what `budget` does not read. A budget
/// that asks for partitions or every key that a search scores, which codes do not have, gets `ivf`.
void resolve_auto(std::string& spec, Budget& budget, const SessionParams& params,
                  const ModelShape& model, const CodeRoom& room);

}  // namespace keyhole::runtime

// The floor under every hand-off: a flag over the bus to the host, and the host's flag back.
#pragma once

/// The median nanoseconds of a round trip, of so many in one kernel. The calling thread plays the host.
double flag_round_trip_ns(int round_trips);

# Sourced by scripts that start ranks: Open MPI as any user, on fewer cores than ranks, with shared memory alone, since some
# sandboxes have no network. Where mpirun starts nothing, the test is skipped.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_btl=self,vader OMPI_MCA_hwloc_base_binding_policy=none
timeout 60 mpirun -n 1 true >/dev/null 2>&1 || { echo "skipped: mpirun starts nothing here"; exit 77; }

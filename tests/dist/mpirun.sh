#!/usr/bin/env bash
# Runs a program on several ranks of this machine, more than it has cores if need be, also as root (a container's user).
# Waiting ranks give their core away. Every rank has one thread.
#   mpirun.sh MPIRUN RANKS PROGRAM [ARGUMENT ...]
set -euo pipefail

mpirun=$1 ranks=$2
shift 2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl=self,vader,tcp OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_plm_rsh_agent=false
# Sanitizers: Open MPI itself keeps memory to its end.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0}
exec "$mpirun" -n "$ranks" "$@"

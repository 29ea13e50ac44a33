#!/usr/bin/env bash
# Slurm and an SSH server for the integration suite "launchers": nothing else needs them.
set -euo pipefail
PATH=$PATH:/usr/sbin
missing=
for name in slurmctld slurmd sbatch munged sshd ssh; do
  command -v "$name" >/dev/null || missing="$missing $name"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing Slurm, munge and an SSH server, for tests of the launchers ..."
  apt-get update -qq >/dev/null 2>&1 || true
  # The tests start their own daemons, so that none of the packages' has to run.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
  fi
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
    slurmctld slurmd slurm-client munge openssh-server openssh-client >/dev/null && exit 0
fi
echo "not found, which the tests of the launchers need:$missing; install them (Debian, Ubuntu: apt-get" \
  "install slurmctld slurmd slurm-client munge openssh-server)" >&2
exit 1

#!/bin/sh
# A release note from the last commits of a git repository: the model is one command of a pipe.
# usage: examples/changelog.sh [MODEL] [COMMITS]
set -eu
git log --no-merges --format='- %s' -n "${2:-10}" |
  tamis run -m "${1:-smollm2}" -f - --temp 0 -n 120 \
    --system 'Write one short paragraph that tells users what these changes bring.' |
  fold -s -w 80

#!/usr/bin/env bash
# Train tool calling with two rewards: recipes/tool_calling/run.sh CONFIG [OVERRIDE...]
# Without CONFIG it lists the configurations. See README.md.
exec "$(dirname "${BASH_SOURCE[0]}")/../common/run.sh" tool_calling "$@"

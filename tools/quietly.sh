# quietly LOG COMMAND...: runs a command whose output goes to LOG. On a terminal the compilers' counter, "[12/170]", moves in one
# line; elsewhere only the log is named. A failure prints the end of the log and exits; warnings of a success are counted.
# For scripts with `set -euo pipefail`; to be sourced.
quietly() {
  local log=$1 warnings
  shift
  mkdir -p "$(dirname "$log")"
  [ -t 1 ] || echo "$log is being written"
  if ! "$@" 2>&1 </dev/null | tee "$log" | quietly_count; then
    tail -30 "$log"
    printf '\nThis failed: %s\nAll that it printed is in %s\n' "$*" "$log"
    exit 1
  fi
  warnings=$(grep -c 'warning:' "$log" || true)
  [ "$warnings" -eq 0 ] || echo "$warnings lines with warnings: $log"
}

quietly_count() {
  local line
  while IFS= read -r line; do
    [ ! -t 1 ] || [[ $line != \[* ]] || printf '\r%s' "${line%%]*}] "
  done
  [ ! -t 1 ] || printf '\r'
}

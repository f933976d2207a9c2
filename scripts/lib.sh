# shellcheck shell=bash
# SPDX-License-Identifier: GPL-2.0
# Common to all scripts: messages, steps with their elapsed time, locks, disk space.

set -euo pipefail

top=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)

die() { printf 'error: %s\n' "$*" >&2; exit 1; }
say() { printf '%s\n' "$*" >&2; }

# need TOOL...: the host has these tools.
need() {
	local tool
	for tool; do
		command -v "$tool" >/dev/null ||
			die "'$tool' is missing: install it (Debian: apt install $tool)"
	done
}

# room DIR MIB: DIR's file system has that much space.
room() {
	local free
	free=$(($(df -kP "$1" | awk 'NR == 2 { print $4 }') / 1024))
	((free >= $2)) ||
		die "$1 has $free MiB free and $2 MiB are needed: free some, or set RDMA_RS_CACHE to another disk"
}

# locked FILE CMD...: runs CMD while holding the lock FILE.
locked() {
	local lock=$1
	shift
	(
		flock -n 9 || { say "waiting for another run to finish (lock $lock)"; flock 9; }
		"$@" 9>&-
	) 9>"$lock"
}

# A line that shows how long a step takes: rewritten on a terminal, every 30 s elsewhere.
ticker() {
	local title=$1 log=$2 lines=$3 begin=$SECONDS every=30 form='  %s: %s s%s\n' done_ part=
	[[ -t 2 ]] && every=1 form='\r\033[K  %s: %s s%s'
	while sleep "$every" && kill -0 $$ 2>/dev/null; do
		done_=$(wc -l <"$log")
		((lines == 0)) || part=", $((done_ * 100 / lines > 99 ? 99 : done_ * 100 / lines)) %"
		# shellcheck disable=SC2059
		printf "$form" "$title" "$((SECONDS - begin))" "$part" >&2
	done
}

# step TITLE LINES CMD...: runs CMD quietly; on failure shows the end of its output.
# LINES is about how many lines it prints, for a percentage; 0 if unknown.
step() {
	local title=$1 lines=$2 log begin=$SECONDS rc=0 tick
	shift 2
	log=$(mktemp)
	ticker "$title" "$log" "$lines" &
	tick=$!
	"$@" >"$log" 2>&1 || rc=$?
	{ kill "$tick" && wait "$tick"; } 2>/dev/null || :
	[[ ! -t 2 ]] || printf '\r\033[K' >&2
	if ((rc)); then
		say "  $title: failed after $((SECONDS - begin)) s:"
		tail -n "${STEP_TAIL:-20}" "$log" | sed 's/^/    /' >&2
	else
		say "  $title: $((SECONDS - begin)) s"
	fi
	rm -f "$log"
	return "$rc"
}

# Tests print "ok NAME" or "not ok NAME # REASON"; a name that is ever not ok has failed.
# tally: passes such lines on from its input, then counts; fails unless all are ok, and there are any. The
# results are in tests.ktap of $report, or of build/report, as well, which kunit.py parse reads.
tally() {
	local dir=${report:-$top/build/report} line name passed=0 failed=0 names=()
	local -A bad=()
	while IFS= read -r line; do
		printf '%s\n' "$line"
		[[ $line =~ ^(not )?ok\ (.*)$ ]] || continue
		name=${BASH_REMATCH[2]%% # *}
		[[ ${bad[$name]+known} ]] || names+=("$name")
		bad[$name]=${bad[$name]-}${BASH_REMATCH[1]}
	done
	echo
	mkdir -p "$dir"
	{
		printf 'KTAP version 1\n1..%s\n' "${#names[@]}" >&9
		for name in "${names[@]}"; do
			if [[ ${bad[$name]} ]]; then
				((++failed))
				echo "failed: $name"
				printf 'not ok %s %s\n' "$((passed + failed))" "$name" >&9
			else
				((++passed))
				printf 'ok %s %s\n' "$((passed + failed))" "$name" >&9
			fi
		done
	} 9>"$dir/tests.ktap"
	echo "$passed passed, $failed failed"
	((failed == 0 && passed > 0))
}

# result NAME CMD...: runs CMD as a test.
result() {
	local name=$1 said begin=$SECONDS
	shift
	if said=$("$@" 2>&1); then
		echo "ok $name # $((SECONDS - begin)) s"
	else
		echo "not ok $name # $(tail -n 1 <<<"$said")"
		tail -n 30 <<<"$said" | sed 's/^/    /'
	fi
}

# clean_log PREFIX FILE: a test that left something bad in the kernel log has failed.
clean_log() {
	"$top/scripts/scan-log" "$2" | sed "s/^/not ok $1: /"
}

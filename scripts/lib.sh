# shellcheck shell=bash
# SPDX-License-Identifier: GPL-2.0
# Common to all scripts: messages, steps with their elapsed time, locks, disk space.

set -euo pipefail

top=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)

die() { printf 'error: %s\n' "$*" | on_host >&2; exit 1; }
say() { printf '%s\n' "$*" | on_host >&2; }

# on_host: passes its input on, with files of the sandbox as the host names them.
on_host() {
	local dir host script=()
	while IFS='=' read -r dir host; do
		[[ ! $host ]] || script+=(-e "s|(^\|[[:space:]'\"\`(=:])$dir/|\\1$host/|g")
	done < <(printf '%s\n' "/rdma-rs=${RDMA_RS_HOST_TOP:-}" "/ulp=${RDMA_RS_HOST_ULP:-}" \
		"/cache=${RDMA_RS_HOST_CACHE:-}" | sed 's/[&\|]/\\&/g')
	if ((${#script[@]})); then sed -uE "${script[@]}"; else cat; fi
}

# Where kbuild tries the compiler's options. By itself it does so in the folder of the kernel, which several checkouts use
# at once, each in a sandbox that has the same numbers of processes: one removes what another one tries.
kbuild_probes='TMPOUT=/tmp/.tmp_$$$$'

# need TOOL...: the host has these tools.
need() {
	local tool
	for tool; do
		command -v "$tool" >/dev/null ||
			die "'$tool' is missing: install it (Debian: apt install $tool)"
	done
}

# number NAME VALUE: a seed or a count is one that 64 bits hold.
number() {
	[[ $2 =~ ^(0|[1-9][0-9]{0,18})$ ]] || die "$1=$2: a number of 19 digits at most is wanted"
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
	local title=$1 log=$2 lines=$3 begin=$SECONDS every=30 form='  %s: %s s%s\n' done_ part='' never
	[[ -t 2 ]] && every=1 form='\r\033[K  %s: %s s%s'
	# A sleep would outlive the step, with the pipes that it has of its callers: nothing comes from this one.
	exec {never}<> <(:)
	while ! read -rt "$every" -u "$never" && kill -0 $$ 2>/dev/null; do
		done_=$(wc -l <"$log")
		((lines == 0)) || part=", $((done_ * 100 / lines > 99 ? 99 : done_ * 100 / lines)) %"
		# shellcheck disable=SC2059
		printf "$form" "$title" "$((SECONDS - begin))" "$part" >&2
	done
}

# errors LOG LINES: the errors of compilers, make, apt and scripts in a log, the first ones as they are, up to so many
# lines, and each of the others in a line of its own; or the end of a log without any.
errors() {
	local said
	said=$(awk -v most="$2" '
		# The lines of an error, of which the first is in `head`, with the place of it.
		function end() {
			if (!head) return
			place = ""
			if (match(text, /\n *--> [^\n]*/)) {
				place = substr(text, RSTART, RLENGTH)
				sub(/^\n *--> /, "", place)
				place = place ": "
			}
			++count
			if (count == 1 || (!cut && printed + lines <= most)) { print text "\n"; printed += lines + 1 }
			else { cut = 1; print place head }
			head = ""
		}
		function begin(block) { end(); head = text = $0; lines = 1; kind = block }
		{ gsub(/\033\[[0-9;]*m/, "") }
		/^error: aborting due to / { next }
		/^error(\[E[0-9]+\])?: / { begin("rustc"); next }
		/(^|[ :])(fatal )?error: |undefined reference to/ { begin("cc"); next }
		/^(ERROR|E): / { begin("line"); end(); next }
		/: \*\*\* / && !/ Error [0-9]+$/ && !make { make = $0 }
		!head { next }
		/^$/ { end(); next }
		kind == "rustc" || /^ *[0-9]* \|/ { text = text "\n" $0; ++lines; next }
		{ end() }
		END {
			end()
			if (count > 1) print count " errors"
			if (!count && make) print make
		}' "$1")
	if [[ $said ]]; then echo "$said"; else tail -n "$2" "$1"; fi
}

# step TITLE LINES CMD...: runs CMD quietly; on failure shows the errors in its output, all of which is kept in the
# folder $STEP_LOGS, or build/log. LINES is about how many lines it prints, for a percentage; 0 if unknown.
step() {
	local title=$1 lines=$2 log kept begin=$SECONDS rc=0 tick
	shift 2
	log=$(mktemp)
	ticker "$title" "$log" "$lines" &
	tick=$!
	"$@" >"$log" 2>&1 || rc=$?
	{ kill "$tick" && wait "$tick"; } 2>/dev/null || :
	[[ ! -t 2 ]] || printf '\r\033[K' >&2
	if ((rc)); then
		say "  $title: failed after $((SECONDS - begin)) s:"
		kept=$(tr -cs '[:alnum:]._+' - <<<"$title")
		kept=${STEP_LOGS:-$top/build/log}/${kept%-}.log
		{ mkdir -p "${kept%/*}" && cp "$log" "$kept"; } 2>/dev/null || kept=''
		errors "$log" "${STEP_TAIL:-20}" | on_host | sed 's/^./    &/' >&2
		[[ ! $kept ]] || say "  all of it is in $kept"
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

# before_failures FILE: prints what stands in a kernel log before cases of KUnit that have failed.
before_failures() {
	grep -B 12 -E '^\[[^]]*\] +not ok ' "$1" | on_host | sed 's/^/    /' || :
}

# clean_log PREFIX FILE: a test that left something bad in the kernel log has failed.
clean_log() {
	"$top/scripts/logs/scan-log" "$2" | sed "s/^/not ok $1: /"
}

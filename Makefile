# SPDX-License-Identifier: GPL-2.0
# With KDIR=, a plain out-of-tree build against that kernel's headers. Without it, everything runs in
# the sandbox, which scripts/sandbox makes when it is first needed. kbuild itself reads Kbuild.

export KERNEL
sandbox := scripts/sandbox

.PHONY: help modules modules_install demo test vm check kunit random soak faults fuzz storms nvme nvme-hostile nvme-power \
	ninep races rt bench patches doc rust-analyzer deb package-test hosts next intree ulp on-device update clean distclean

ifneq ($(KDIR),)

out := $(CURDIR)/build/$(notdir $(patsubst %/build,%,$(abspath $(KDIR))))

# The kernel's configuration, and its compilers unless others are named.
-include $(KDIR)/include/config/auto.conf
RUSTC ?= rustc
BINDGEN ?= bindgen
RUSTFMT ?= rustfmt
ifndef CONFIG_CC_IS_CLANG
built_by := $(subst ",,$(CONFIG_CC_VERSION_TEXT))
ifeq ($(origin CC),default)
CC := $(firstword $(built_by))
endif
args := CC=$(CC)
endif

ifdef NVME_SRC
args += NVME_SRC=$(abspath $(NVME_SRC))
endif

modules: checked
modules modules_install:
	@mkdir -p $(out)
	$(MAKE) -C $(KDIR) M=$(CURDIR) MO=$(out) $(args) $@

# The drivers of NVMe need its private headers (Kbuild).
NVME ?= m
nvme := $(if $(CONFIG_NVME_FABRICS)$(CONFIG_NVME_TARGET),$(NVME))
nvme-src := $(wildcard $(addsuffix /drivers/nvme/host/nvme.h,$(or $(NVME_SRC),$(KDIR)/source $(KDIR))))
nvme-compared := $(if $(nvme-src),$(if $(CONFIG_DEBUG_INFO_BTF),$(nvme)))

# One line says what is missing.
.PHONY: checked
checked:
	@die() { echo "error: $$*" >&2; exit 1; }; \
	[ -f $(KDIR)/include/config/auto.conf ] || die "$(KDIR) is no prepared kernel tree"; \
	[ '$(CONFIG_RUST)' ] || die "the kernel of $(KDIR) has no Rust (CONFIG_RUST)"; \
	[ '$(CONFIG_MODULE_UNLOAD)' ] || die "the kernel of $(KDIR) unloads no modules (CONFIG_MODULE_UNLOAD)"; \
	[ '$(CONFIG_TASKS_RCU)' ] || [ ! '$(CONFIG_PREEMPTION)' ] || \
		die "the kernel of $(KDIR) cannot wait for a task that was preempted (CONFIG_TASKS_RCU)"; \
	[ -f $(KDIR)/rust/libkernel.rmeta ] || die "$(KDIR) has no Rust metadata (rust/libkernel.rmeta);" \
		"for stock Debian kernels, make deb makes a package of it"; \
	revision() { sed 's/.*" \(.*\)"/\1/' $(KDIR)/$$1/package.h; }; \
	[ ! -f $(KDIR)/rust/package.h ] || [ "$$(revision rust)" = "$$(revision include/generated)" ] || \
		die "the Rust metadata of $(KDIR) is that of $$(revision rust), and the headers are of" \
			"$$(revision include/generated)"; \
	is=$$($(RUSTC) --version 2>&1 | tail -n 1); \
	by=$$(grep -aom 1 'rustc [0-9][^)]*)' $(KDIR)/rust/libcore.rmeta | head -n 1); \
	[ "$${is#"$$by"}" != "$$is" ] || die "the Rust metadata of $(KDIR) is that of $$by, and the compiler is $$is"; \
	[ '$(CONFIG_CC_IS_CLANG)' ] || { \
		is=$$($(CC) -dumpfullversion 2>&1 | tail -n 1); \
		[ '$(lastword $(built_by))' = "$$is" ] || \
			die "the kernel of $(KDIR) was built by $(built_by), and $(CC) is $$is"; }; \
	for tool in $(BINDGEN) $(RUSTFMT)$(if $(nvme-compared), python3); do \
		command -v $$tool >/dev/null || die "$$tool is missing: install it"; \
	done; \
	[ -z '$(nvme)' ] || [ '$(nvme-src)' ] || { \
		[ -z '$(NVME_SRC)' ] || die "NVME_SRC=$(NVME_SRC) has no drivers/nvme/host/nvme.h"; \
		echo "note: without nvme_rdma_rs and nvmet_rdma_rs: $(KDIR) has no drivers/nvme/host/nvme.h;" \
			"NVME_SRC= names the source that the kernel was built from"; }

clean:
	rm -rf $(out)

else

help:
	@echo 'make demo        the main job: Rust and userspace exchange verified data on a stock kernel'
	@echo 'make test        every test, on the stock kernel and on kernels with checkers'
	@echo 'make modules     only build the modules: the core, rdma_null, the samples, NVMe and 9P, for the stock kernel,'
	@echo '                 into build/stock'
	@echo 'make vm          a shell in a VM with the modules loaded and an rxe link up'
	@echo 'make check       formatting, clippy, rustdoc, checkpatch, warnings'
	@echo 'make kunit       the KUnit suites under KASAN, lockdep and kmemleak, with SUITE=rdma_cq* only some'
	@echo 'make random      random steps on null devices, rxe and siw in each polling context, with SEED= those of that'
	@echo '                 seed, and the module unloaded in the middle of them'
	@echo 'make soak        ten million completions in each polling context, on the stock kernel; the KUnit suites'
	@echo '                 without debug assertions; as many random steps under KASAN, a fifth under lockdep,'
	@echo '                 and two hours of those on connections: for hours,'
	@echo '                 and goes on where it was interrupted'
	@echo 'make faults      each place that allocates memory fails once, in an hour or more; goes on where it was ended'
	@echo 'make fuzz        a hundred thousand messages of a hostile peer to each sample, SEED=1 or another'
	@echo 'make storms      networks in trouble and ends that nobody expects, in an hour or so, with SEED=;'
	@echo '                 goes on where it was ended'
	@echo 'make nvme        NVMe over RDMA, a HOST= and a TARGET= (c or rust) or all four pairings with verified data and'
	@echo '                 faults, on the stock kernel or with CHECKERS=1 on that with checkers; goes on where it was ended'
	@echo 'make nvme-power  a TARGET= and a HOST= in two kernels, of which one loses its power under load'
	@echo 'make nvme-hostile  hosts and targets that lie, against a TARGET= and a HOST= of NVMe over RDMA'
	@echo 'make ninep       9P over RDMA, a TRANSPORT= (rust, c; with CHECKERS=1 faults, c-faults), each case in a kernel of its'
	@echo '                 own, the stock one or with CHECKERS=1 that with checkers'
	@echo 'make races       the KUnit suites and those with userspace under KCSAN, SUITE=rdma_cq* only some'
	@echo 'make rt          the KUnit suites and those with userspace under PREEMPT_RT, SUITE=rdma_cq* only some'
	@echo 'make bench       Rust against C: instructions and time, a table and plots, in half an hour'
	@echo 'make patches     patches for the kernel: each reproducer fails without its patch and passes with it'
	@echo 'make doc         the pages of Documentation and the crate'\''s own, into build/doc'
	@echo 'make rust-analyzer  rust-project.json, with which editors see the crates'
	@echo 'make deb         Debian packages of the commit, and of the Rust metadata of the stock kernel, into build/deb'
	@echo 'make package-test  installs them in a fresh Debian, uses, upgrades and removes them;'
	@echo '                 goes on where it was ended'
	@echo 'make hosts       what hosts of several kinds make the sandbox from, or are said to miss'
	@echo 'make intree      the patches for the kernel'\''s tree, each built, and the kernel with them tried; goes on'
	@echo '                 where it was ended'
	@echo 'make next        the modules and the demo on the newest kernel of Debian unstable or experimental, with the'
	@echo '                 compilers of unstable'
	@echo 'make ulp NAME= DIR=  a new ULP in a folder of its own, which builds and runs with make there'
	@echo 'make on-device DEV=  tries an RDMA device of this machine, outside the sandbox, and writes a report to send;'
	@echo '                 with DRY=1 it only says what it would do; with SERVE=1 it is the other end for a second machine,'
	@echo '                 where PEER= is the address of this one'
	@echo 'make update      look for newer kernels on the mirror the next time'
	@echo 'make clean       remove build/'
	@echo 'make distclean   remove build/ and the cache'
	@echo
	@echo 'KERNEL=7.3.4     another kernel of Debian 13 than the newest 7.3, from 7.3 on'
	@echo 'ARCH=arm64       with make modules, test, deb and package-test: Debian'\''s kernel for arm64, which is emulated'
	@echo 'RDMA_RS_CACHE=   the cache, otherwise in ~/.cache/rdma-rs'
	@echo
	@echo 'make KDIR=/lib/modules/$$(uname -r)/build [modules_install|clean]'
	@echo '                 a plain build without the sandbox, if that kernel has Rust metadata; with NVME_SRC=, the'
	@echo '                 source of that kernel, the drivers of NVMe as well'

ifneq ($(filter-out x86 x86_64 arm64,$(ARCH)),)
$(error ARCH=$(ARCH): there is arm64, and x86_64 without it)
endif
ifeq ($(ARCH),arm64)
ifneq ($(filter-out help modules test deb package-test update clean distclean,$(or $(MAKECMDGOALS),help)),)
$(error ARCH=arm64 is for make modules, test, deb and package-test)
endif
modules:
	@$(sandbox) scripts/build arm64 modules TESTS=

test:
	@$(sandbox) $(tally) scripts/suite arm64

arm64 := arm64
else
modules:
	@$(sandbox) scripts/build stock modules TESTS=

test:
	@$(sandbox) scripts/test
endif

modules_install:
	@echo 'error: say for which kernel: make KDIR=/lib/modules/$$(uname -r)/build $@' >&2; exit 1

# These print tests, which are counted here, so that it fails where one does.
tally := bash -c '. scripts/lib.sh; "$$@" | tally' tally

# $(call on,SWITCH): it is given, and not as 0.
on = $(filter-out 0,$($(1)))

on-device:
	@[ '$(DEV)' ] || { echo 'error: say which device: make on-device DEV=rxe0' >&2; exit 2; }
	@scripts/on-device $(call quoted,DEV) $(if $(call on,DRY),--dry-run) $(if $(call on,SERVE),--serve) \
		$(if $(PEER),--peer $(call quoted,PEER))

demo check bench doc:
	@$(sandbox) scripts/$@

patches:
	@$(sandbox) scripts/upstream/patches

soak:
	@$(sandbox) scripts/stress/soak

kunit:
	@$(sandbox) $(tally) scripts/kunit '$(SUITE)'

random:
	@$(sandbox) $(tally) scripts/stress/random --all $(if $(SEED),--seed $(call quoted,SEED)) \
		$(if $(STEPS),--steps $(call quoted,STEPS))

faults:
	@$(sandbox) $(tally) scripts/stress/faults

storms:
	@$(sandbox) scripts/stress/storms $(if $(SEED),--seed $(call quoted,SEED))

# The environment may have a HOST that is something else.
given = $(if $(filter command,$(origin $(1))),--$(2) $(call quoted,$(1)))
end = $(if $(filter command,$(origin $(1))),$(call quoted,$(1)),c)

nvme:
	@$(sandbox) $(tally) scripts/nvme/matrix $(if $(call on,CHECKERS),--kernel um-debug) $(call given,HOST,host) \
		$(call given,TARGET,target)

# Each boots a kernel: the second begins after the first, which may take an hour, and both ends are looked at before.
nvme-hostile:
	@for end in $(call end,TARGET) $(call end,HOST); do case $$end in c|rust|c,*|rust,*) ;; \
		*) echo "error: '$$end' is no end: c and rust are" >&2; exit 2;; esac; done
	@$(sandbox) $(tally) bash -c 'scripts/nvme/hostile --end "$$1" target; scripts/nvme/hostile --end "$$2" host' \
		both $(call end,TARGET) $(call end,HOST)

nvme-power:
	@$(sandbox) $(tally) scripts/nvme/power $(call given,HOST,host) $(call given,TARGET,target)

ninep:
	@$(sandbox) $(tally) scripts/ninep/cases --kernel $(if $(call on,CHECKERS),um-debug,stock) $(call given,TRANSPORT,transport)

races rt:
	@$(sandbox) scripts/stress/$@ $(if $(SUITE),'$(SUITE)')

fuzz:
	@$(sandbox) scripts/stress/fuzz $(if $(SEED),$(call quoted,SEED))

vm:
	@$(sandbox) scripts/vm

deb:
	@git archive HEAD | $(sandbox) scripts/packaging/deb $(addprefix --,$(arm64))

hosts:
	@$(sandbox) $(tally) scripts/checks/hosts

intree:
	@$(sandbox) $(tally) scripts/upstream/intree

next:
	@$(sandbox) $(tally) scripts/kernels/next

package-test:
	@git archive HEAD | $(sandbox) $(tally) scripts/packaging/package-test$(addprefix -,$(arm64))

# $(call quoted,VARIABLE): its value as the user has written it, as one word of the shell.
quoted = '$(subst ','\'',$(value $(1)))'

# A shell that is not bash leaves the ~ in DIR=~/hello to others.
ulp-dir = $(patsubst ~/%,$(HOME)/%,$(or $(DIR),$(error say where: make ulp NAME=hello DIR=...)))
ulp:
	@$(sandbox) scripts/ulp name $(call quoted,NAME)
	@mkdir -p '$(ulp-dir)'
	@ULP='$(ulp-dir)' $(sandbox) scripts/ulp new $(call quoted,NAME)

# What the Makefile of such a ULP calls, with its folder in $ULP.
ulp-test:
	@$(sandbox) bash -c '. scripts/lib.sh; scripts/ulp test | report=/ulp/build tally'

ulp-run:
	@$(sandbox) scripts/ulp run $(if $(call on,CHECKERS),--checkers) $(if $(TIMEOUT),--timeout $(call quoted,TIMEOUT)) \
		$(call quoted,PARAMS) $(call quoted,CMD)

ulp-%:
	@$(sandbox) scripts/ulp $*

rust-analyzer:
	@$(sandbox) sh -c 'scripts/build stock && scripts/rust-analyzer' >/dev/null

update:
	@$(sandbox) scripts/kernel update

clean:
	rm -rf build

distclean: clean
	@$(sandbox) --distclean

endif

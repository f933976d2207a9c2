# SPDX-License-Identifier: GPL-2.0
#
# The rules that kbuild has no name for yet: bindings, procedural macros, and crates that other modules use.

rdma-bindings	:= $(obj)/rust/bindings
rdma-macros	:= $(obj)/rust/macros
rdma-crate	:= $(obj)/rust/kernel/rdma

# The symbols' names are all that the module loader compares, and layouts are no part of them. So the
# names carry a hash of what decides on layouts: sources, the kernel's configuration and release (the
# compiler is in the former), flags from the command line. A module that was built against another
# build of the crate is then refused: "Unknown symbol".
rdma-hash = $(or $(shell { cd $(src) && \
		find $(1) -type f \( -name '*.rs' -o -name '*.[chS]' -o -name '*.mk' \) | LC_ALL=C sort | \
		xargs sha256sum; cd $(abspath $(objtree)) && \
		cat include/config/auto.conf include/config/kernel.release; \
		echo '$(KRUSTFLAGS)'; } | sha256sum | cut -c1-16),$(error no hash of $(1)))
rdma-build	:= $(call rdma-hash,rust)
rdma-null-build	= $(call rdma-hash,rust/bindings drivers/null)

# Bindings. libclang parses C also where GCC compiles it, so GCC's own flags are left out, as rust/Makefile does.
bindgen-skip-c-flags := -mno-fp-ret-in-387 -mpreferred-stack-boundary=% \
	-mskip-rax-setup -mgeneral-regs-only -msign-return-address=% \
	-mindirect-branch=thunk-extern -mindirect-branch-register \
	-mfunction-return=thunk-extern -mrecord-mcount -mabi=lp64 \
	-mindirect-branch-cs-prefix -mstack-protector-guard% -mtraceback=no \
	-mno-pointers-to-nested-functions -mno-string \
	-mno-strict-align -mstrict-align -mdirect-extern-access \
	-mexplicit-relocs -mno-check-zero-division \
	-fconserve-stack -falign-jumps=% -falign-loops=% \
	-femit-struct-debug-baseonly -fno-ipa-cp-clone -fno-ipa-sra \
	-fno-partial-inlining -fplugin-arg-arm_ssp_per_task_plugin-% \
	-fno-reorder-blocks -fno-allow-store-data-races -fasan-shadow-offset=% \
	-fzero-call-used-regs=% -fno-stack-clash-protection \
	-fno-inline-functions-called-once -fsanitize=bounds-strict \
	-fstrict-flex-arrays=% -fmin-function-alignment=% \
	-fzero-init-padding-bits=% -mno-fdpic \
	-fdiagnostics-show-context -fdiagnostics-show-context=% \
	--param=% --param asan-% -fno-isolate-erroneous-paths-dereference \
	-ffixed-r2 -mmultiple -mno-readonly-in-sdata
bindgen-target-x86	:= x86_64-linux-gnu
bindgen-target-arm64	:= aarch64-linux-gnu
bindgen-c-flags = $(if $(CONFIG_CC_IS_CLANG),$(c_flags),$(filter-out $(bindgen-skip-c-flags),$(c_flags)) \
	-w --target=$(bindgen-target-$(SRCARCH)))

# Where the kernel's tree is that of a headers package, its parameters come with the metadata of its crates.
rdma-bindgen-params = $(firstword $(wildcard $(addsuffix /rust/bindgen_parameters,$(srctree) $(objtree))))

# A rule sets rdma-bindgen-args, which say what is bound, and rdma-bindgen-c-flags. bindgen does not make the hundreds
# of `Default::default()` inline, so each would be a function, and exported. As inline ones those that are used are
# compiled, where they are used.
quiet_cmd_rdma_bindgen = BINDGEN $(quiet_modtag) $@
      cmd_rdma_bindgen = \
	$(BINDGEN) $< $(shell grep -Ev '^\#|^$$' $(rdma-bindgen-params)) \
		--rust-target 1.85 --use-core --with-derive-default --ctypes-prefix ffi \
		--no-debug '.*' --enable-function-attribute-detection \
		--no-recursive-allowlist --default-non-copy-union-style manually_drop \
		$(rdma-bindgen-args) \
		-o $@ -- $(bindgen-c-flags) $(rdma-bindgen-c-flags) -fno-builtin -D__BINDGEN__ -DMODULE; \
	sed -Ei 's/^( *)fn default\(\) -> Self \{/\1\#[inline]\n&/' $@

# Types that the RDMA headers use and `kernel::bindings` does not bind.
rdma-bindgen-types := dim ifla_vf_guid ifla_vf_info ifla_vf_stats iphdr irq_poll irq_poll_fn \
	netdevice_tracker possible_net_t rdma_cgroup rdmacg_device tph_mem_type

$(rdma-bindings)/rdma_bindings_generated.rs: private rdma-bindgen-args := --no-layout-tests \
	--allowlist-file '.*/include/(uapi/)?rdma/.*' --allowlist-file '.*/rust/helpers/.*' \
	$(addprefix --allowlist-type ,$(rdma-bindgen-types)) \
	$(addprefix --opaque-type ,dim ifla_vf_info ifla_vf_stats iphdr rdma_cgroup)
$(rdma-bindings)/rdma_bindings_generated.rs: private rdma-bindgen-c-flags := -I$(src)/rust/helpers
$(rdma-bindings)/rdma_bindings_generated.rs: $(src)/rust/bindings/rdma_bindings.h $(src)/rust/helpers/helpers.h FORCE
	$(call if_changed_dep,rdma_bindgen)
targets += rust/bindings/rdma_bindings_generated.rs

$(rdma-bindings)/rdma_bindings.o: private export RDMA_BINDINGS_DIR := $(abspath $(rdma-bindings))
$(rdma-bindings)/rdma_bindings.o: $(rdma-bindings)/rdma_bindings_generated.rs $(rdma-bindings)/static_branch_generated.rs
RUSTFLAGS_rust/bindings/rdma_bindings.o += -Cmetadata=$(rdma-build) --emit=metadata=$(rdma-bindings)/librdma_bindings.rmeta

quiet_cmd_rdma_static_branch = RSCPP $(quiet_modtag) $@
      cmd_rdma_static_branch = \
	$(CPP) $(c_flags) -xc -C -P $< | sed '1,/^\/\/ Cut here\.$$/d; s/^macro_rules/\#[macro_export]\n&/' >$@
$(rdma-bindings)/static_branch_generated.rs: $(src)/rust/bindings/static_branch.rs.S FORCE
	$(call if_changed_dep,rdma_static_branch)
targets += rust/bindings/static_branch_generated.rs

# Procedural macros run on the host, inside the compiler.
quiet_cmd_rdma_procmacro = $(RUSTC_OR_CLIPPY_QUIET) P $(quiet_modtag) $@
      cmd_rdma_procmacro = \
	$(RUSTC_OR_CLIPPY) $(rust_common_flags) \
		-Clinker-flavor=gcc -Clinker=$(HOSTCC) \
		--emit=dep-info=$(depfile) --emit=link=$@ --extern proc_macro \
		--crate-type proc-macro --crate-name rdma_macros $<
$(rdma-macros)/librdma_macros.so: $(src)/rust/macros/lib.rs FORCE
	+$(call if_changed_dep,rdma_procmacro)
targets += rust/macros/librdma_macros.so
$(rdma-macros)/librdma_macros.so: $(src)/rust/macros/has_cqe.rs

# The crate.
$(rdma-crate)/rdma.o: $(rdma-bindings)/rdma_bindings.o $(rdma-macros)/librdma_macros.so
$(rdma-crate)/rdma.o: private export RDMA_BUILD := $(rdma-build)
RUSTFLAGS_rust/kernel/rdma/rdma.o += -Cmetadata=$(rdma-build) --emit=metadata=$(rdma-crate)/librdma.rmeta \
	-L $(rdma-bindings) -L $(rdma-macros) --extern rdma_bindings --extern rdma_macros

# What a crate that uses `rdma` is compiled with. What it exports itself may hand on types of `rdma`.
rdma-user-flags := -Cmetadata=$(rdma-build) -L $(rdma-crate) -L $(rdma-bindings) -L $(rdma-macros) --extern rdma

# $(call rdma-user,OBJECT): the object is a crate that uses `rdma`.
rdma-user = $(eval $(obj)/$(1): $(rdma-crate)/rdma.o)$(eval RUSTFLAGS_$(1) := $(rdma-user-flags))

# $(call rdma-ulp,OPTION,MODULE,OBJECT): the module is one crate that uses `rdma`.
rdma-ulp = $(eval obj-$($(1)) += $(2).o)$(eval $(2)-y := $(3))$(call rdma-user,$(3))

# What a crate that uses `rdma_null`, the device for tests, is compiled with.
rdma-null-flags := -L $(obj)/drivers/null --extern rdma_null

# Export a crate's Rust symbols: ULPs, some of them not here, link against them. What module! makes for .modinfo is not
# among them: that section is not kept, and on arm64 a reference to where it was may be too far to be relocated.
quiet_cmd_rdma_exports = EXPORTS $(quiet_modtag) $@
      cmd_rdma_exports = \
	$(NM) -p --defined-only $(filter %.o,$^) | \
	awk '$$2 ~ /(T|R|D|B)/ && $$3 ~ /^_R/ && \
		$$3 !~ /(_(init|cleanup)_module|MODINFO)$$/ && $$3 !~ /__(module_init|pfx|cfi|odr_asan)/ && \
		$$3 !~ /module_parameters[0-9]+___/ \
		{ printf "EXPORT_SYMBOL_RUST_GPL(%s);\n", $$3 }' > $@

# The C files declare the symbols as `extern int`: take the checksums from the Rust objects.
rdma-gensymtypes = $(call getexportsymbols,\1) | \
	$(objtree)/scripts/gendwarfksyms/gendwarfksyms \
		$(if $(KBUILD_GENDWARFKSYMS_STABLE), --stable) \
		$(if $(KBUILD_SYMTYPES), --symtypes $(@:.o=.symtypes),)

# $(call rdma-exports,FOLDER,OBJECTS): the folder's exports.c exports what the objects have.
define rdma-exports
$(obj)/$(1)/exports_generated.h: $(addprefix $(obj)/,$(2)) FORCE
	$$(call if_changed,rdma_exports)
targets += $(1)/exports_generated.h
$(obj)/$(1)/exports.o: $(obj)/$(1)/exports_generated.h
CFLAGS_$(1)/exports.o := -I$(obj)/$(1)
$(if $(CONFIG_MODVERSIONS),
$(obj)/$(1)/exports.o: private cmd_gensymtypes_c = $$(rdma-gensymtypes) $(addprefix $(obj)/,$(2)))
endef

# define_trace.h includes the header of the trace events again, by its name.
CFLAGS_rust/helpers/helpers.o := -I$(src)/rust/helpers

# SPDX-License-Identifier: GPL-2.0
#
# The rules of the NVMe drivers, whose bindings are of headers that are private to drivers/nvme of the kernel.
# NVME_SRC is a folder that has them.

# Types that the headers use and `kernel::bindings` does not bind, in one configuration or another.
nvme-bindgen-types := __kfifo async_cookie_t async_func_t fault_attr opal_dev

# The kernel's modules: where it was built, or, below NVME_ROOT, where it is installed. Its image is there, or, for its
# BTF, in the headers package.
nvme-installed	:= $(NVME_ROOT)/lib/modules/$(KERNELRELEASE)
nvme-modules	:= $(if $(wildcard $(objtree)/drivers/nvme/*/*.ko),$(objtree),$(nvme-installed)/kernel)/drivers/nvme
nvme-image	:= $(firstword $(wildcard $(objtree)/vmlinux $(NVME_ROOT)/boot/vmlinuz-$(KERNELRELEASE) \
	$(nvme-installed)/vmlinuz $(addsuffix /vmlinuz,$(NVME_ROOT))) $(NVME_ROOT)/boot/vmlinuz-$(KERNELRELEASE))

# Layouts are compared with what the kernel's BTF says. A kernel that has none was built here, of that source.
# Sizes and times of what they are compared with are in the command: a newer package's files may be older than a build.
quiet_cmd_nvme_layouts = LAYOUTS $(quiet_modtag) $@
ifdef CONFIG_DEBUG_INFO_BTF
      cmd_nvme_layouts = : $(shell stat -Lc %s,%Y $(nvme-image) $(nvme-btf) 2>/dev/null); \
	$(PYTHON3) $(filter %.py,$^) '$(nvme-image)' '$(nvme-btf)' $(filter %.rs,$^) > $@
else
      cmd_nvme_layouts = echo '// This kernel has no BTF to compare with.' > $@
endif

# $(call nvme-driver,FOLDER,ROOT,MODULES): the bindings of a driver, whose crate is ROOT.rs, and the modules of the
# kernel that have the same types. Those that are built in are in the image.
define nvme-driver
$(obj)/drivers/nvme/$(1)/bindings_generated.rs: private rdma-bindgen-args := \
	--allowlist-file '.*/drivers/nvme/$(1)/.*' --allowlist-file '.*/include/linux/nvme[^/]*' \
	$(addprefix --allowlist-type ,$(nvme-bindgen-types))
$(obj)/drivers/nvme/$(1)/bindings_generated.rs: private rdma-bindgen-c-flags := -I$(NVME_SRC)/drivers/nvme/$(1)
$(obj)/drivers/nvme/$(1)/bindings_generated.rs: $(src)/drivers/nvme/$(1)/bindings.h FORCE
	$$(call if_changed_dep,rdma_bindgen)
$(obj)/drivers/nvme/$(1)/layouts_generated.rs: private nvme-btf := $(foreach module,$(3), \
	$(or $(wildcard $(nvme-modules)/$(1)/$(module).ko*),$(nvme-modules)/$(1)/$(module).ko))
$(obj)/drivers/nvme/$(1)/layouts_generated.rs: $(src)/drivers/nvme/layouts.py \
		$(obj)/drivers/nvme/$(1)/bindings_generated.rs $(wildcard $(src)/drivers/nvme/*.rs) \
		$(sort $(shell find $(src)/drivers/nvme/$(1) -name '*.rs' ! -name '*_generated.rs')) FORCE
	$$(call if_changed,nvme_layouts)
targets += $(addprefix drivers/nvme/$(1)/,bindings_generated.rs layouts_generated.rs)

$(obj)/drivers/nvme/$(1)/$(2).o: private export NVME_BINDINGS_DIR := $(abspath $(obj)/drivers/nvme/$(1))
$(obj)/drivers/nvme/$(1)/$(2).o: $(rdma-crate)/rdma.o \
	$(addprefix $(obj)/drivers/nvme/$(1)/,bindings_generated.rs layouts_generated.rs)
RUSTFLAGS_drivers/nvme/$(1)/$(2).o := $(rdma-user-flags)
CFLAGS_drivers/nvme/$(1)/helpers.o := -I$(NVME_SRC)/drivers/nvme/$(1)
endef

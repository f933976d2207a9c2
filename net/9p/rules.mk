# SPDX-License-Identifier: GPL-2.0
#
# The rules of the transport of 9P, whose bindings are made, and compared with the kernel's own types, as those of
# drivers/nvme/rules.mk.

ninep := $(obj)/net/9p

$(ninep)/bindings_generated.rs: private rdma-bindgen-args := --allowlist-file '.*/include/net/9p/[^/]*' \
	--allowlist-file '.*/net/9p/helpers.h' --allowlist-type fs_context
$(ninep)/bindings_generated.rs: $(src)/net/9p/bindings.h FORCE
	$(call if_changed_dep,rdma_bindgen)
$(ninep)/layouts_generated.rs: private nvme-btf := $(ninep-module)
$(ninep)/layouts_generated.rs: $(src)/drivers/nvme/layouts.py $(ninep)/bindings_generated.rs \
		$(src)/drivers/nvme/bindings.rs $(src)/net/9p/client.rs $(src)/net/9p/trans_rdma.rs FORCE
	$(call if_changed,nvme_layouts)
targets += net/9p/bindings_generated.rs net/9p/layouts_generated.rs

$(ninep)/trans_rdma.o: private export NVME_BINDINGS_DIR := $(abspath $(ninep))
$(ninep)/trans_rdma.o: $(rdma-crate)/rdma.o $(ninep)/bindings_generated.rs $(ninep)/layouts_generated.rs
RUSTFLAGS_net/9p/trans_rdma.o := $(rdma-user-flags)

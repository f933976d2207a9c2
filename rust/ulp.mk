# SPDX-License-Identifier: GPL-2.0
#
# For the Kbuild of a ULP in a folder of its own, whose Rust files this lets use the crate `rdma`, and `rdma_null` for
# its tests:
#
#	obj-m := my_ulp.o
#	include /usr/share/rdma-rs/ulp.mk
#
# RDMA_RS_BUILD is the folder that the core was built in. Otherwise it is the build that dkms has installed for
# the kernel.

rdma-rs-build := $(or $(RDMA_RS_BUILD),$(wildcard /var/lib/dkms/rdma-rs/kernel-$(KERNELRELEASE)-*/dev))

# modpost looks here for what the core exports.
KBUILD_EXTRA_SYMBOLS += $(rdma-rs-build)/Module.symvers

# The name of the module keeps apart the symbols of crates of one name, such as two files main.rs.
rustflags-y = $(if $(rdma-rs-build),,$(error rdma-rs is not installed for $(KERNELRELEASE): see dkms status)) \
	-Cmetadata=$(modname) --extern rdma --extern rdma_null \
	$(addprefix -L $(rdma-rs-build)/,rust/kernel/rdma rust/bindings rust/macros drivers/null)

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The assembly of a static branch, as rust/kernel/generated_arch_static_branch_asm.rs.S of the
 * kernel, which headers packages do not have.
 */

#include <linux/jump_label.h>

// Cut here.

macro_rules! static_branch_asm {
    () => {
        ::kernel::concat_literals!(ARCH_STATIC_BRANCH_ASM("{symb} + {off} + {branch}", "{l_yes}"))
    };
}

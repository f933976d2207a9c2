// SPDX-License-Identifier: GPL-2.0
/* Exports the Rust symbols of the crate `shelf` to the twins. */

#include <linux/export.h>

#define EXPORT_SYMBOL_RUST_GPL(sym) extern int sym; EXPORT_SYMBOL_GPL(sym)

#include "exports_generated.h"

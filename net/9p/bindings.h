/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The headers from which bindgen makes the bindings of a transport of 9P.
 */

#include "helpers.h"

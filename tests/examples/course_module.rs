// SPDX-License-Identifier: GPL-2.0

//! The module of the ULP in steps: see Documentation/course.rst.

use crate::page_course::devices::Course;
use kernel::prelude::*;

rdma::module_rdma_client! {
    type: Course,
    name: "rdma_course",
    authors: ["rdma-rs authors"],
    description: "A module that sees RDMA devices",
    license: "GPL",
}

// SPDX-License-Identifier: GPL-2.0

//! KUnit suites of the crate `rdma`.
//!
//! The module is an RDMA client; KUnit runs its suites once it is loaded, on the first RDMA device.
//! Without one every test that needs it fails.
//!
//! A test never leaves by an assertion of KUnit, which ends the thread and runs no destructors, so
//! that its QPs would stall the unload: the macros of [`check`] return an error.

#[macro_use]
mod check;
#[macro_use]
mod suites;

mod client;
mod fixture;

/// The name of the module.
const NAME: &[u8] = b"rdma_kunit";

suites! {
    completion {
        any_context: suite_any_context,
        context: suite_context,
        cq: suite_cq,
        cq_lock: suite_cq_lock,
        cq_poll: suite_cq_poll,
        cq_pool: suite_cq_pool,
        cq_wait: suite_cq_wait,
        cqe: suite_cqe,
        handler_cell: suite_handler_cell,
        own_handler: suite_own_handler,
        reservation: suite_reservation,
        status: suite_status,
    }
    connection {
        cm_active: suite_cm_active,
        cm_async: suite_cm_async,
        cm_confirm: suite_cm_confirm,
        cm_end: suite_cm_end,
        cm_events: suite_cm_events,
        cm_listen: suite_cm_listen,
        cm_options: suite_cm_options,
        cm_order: suite_cm_order,
        cm_reject: suite_cm_reject,
        cm_request: suite_cm_request,
        cm_silent: suite_cm_silent,
        ibcm: suite_ibcm,
    }
    datagram {
        mad: suite_mad,
        mad_end: suite_mad_end,
        mad_wait: suite_mad_wait,
        ud: suite_ud,
    }
    devices {
        device: suite_device,
        device_event: suite_device_event,
        iwarp: suite_iwarp,
        ratelimit: suite_ratelimit,
        removal: suite_removal,
        teardown: suite_teardown,
    }
    memory {
        dma: suite_dma,
        mr: suite_mr,
        mr_access: suite_mr_access,
        mr_ended: suite_mr_ended,
        mr_inv: suite_mr_inv,
        mr_lock: suite_mr_lock,
        mr_remote: suite_mr_remote,
        mr_repost: suite_mr_repost,
        sg: suite_sg,
        sg_map: suite_sg_map,
        sg_owner: suite_sg_owner,
    }
    null {
        null_chain: suite_null_chain,
        null_cm: suite_null_cm,
        null_context: suite_null_context,
        null_create: suite_null_create,
        null_device: suite_null_device,
        null_events: suite_null_events,
        null_fence: suite_null_fence,
        null_full: suite_null_full,
        null_iwarp: suite_null_iwarp,
        null_lengths: suite_null_lengths,
        null_lost: suite_null_lost,
        null_modify: suite_null_modify,
        null_mr: suite_null_mr,
        null_mute: suite_null_mute,
        null_opcode: suite_null_opcode,
        null_operations: suite_null_operations,
        null_order: suite_null_order,
        null_overrun: suite_null_overrun,
        null_peek: suite_null_peek,
        null_removal: suite_null_removal,
        null_rw: suite_null_rw,
        null_rw_fill: suite_null_rw_fill,
        null_srq: suite_null_srq,
        null_status: suite_null_status,
        null_ud: suite_null_ud,
        null_wait: suite_null_wait,
    }
    queue_pair {
        drain: suite_drain,
        qp: suite_qp,
        qp_events: suite_qp_events,
        qp_modify: suite_qp_modify,
        qp_raw: suite_qp_raw,
    }
    request {
        chain: suite_chain,
        lost_end: suite_lost_end,
        lost_owners: suite_lost_owners,
        op: suite_op,
        operations: suite_operations,
        parts: suite_parts,
        post: suite_post,
        repost: suite_repost,
        requests: suite_requests,
        rw: suite_rw,
        send: suite_send,
        send_ring: suite_send_ring,
        srq: suite_srq,
        srq_ends: suite_srq_ends,
        srq_lost: suite_srq_lost,
        stress: suite_stress,
        threads: suite_threads,
        times: suite_times,
    }
    session {
        course: suite_course,
        session_credits: suite_session_credits,
        session_end: suite_session_end,
        session_recv: suite_session_recv,
        session_room: suite_session_room,
        session_sizes: suite_session_sizes,
        session_tags: suite_session_tags,
        session_turns: suite_session_turns,
    }
}

rdma::module_rdma_client! {
    type: client::Kunit,
    name: "rdma_kunit",
    authors: ["rdma-rs authors"],
    description: "KUnit suites of the crate rdma",
    license: "GPL",
}

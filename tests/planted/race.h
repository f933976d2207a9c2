/* SPDX-License-Identifier: GPL-2.0 */
/* The functions of race.rs. */
#ifndef PLANTED_RACE_H
#define PLANTED_RACE_H

struct work_struct;

void planted_rust_race(struct work_struct *work);
void planted_rust_order(struct work_struct *work);
void planted_rust_lock(struct work_struct *work);

#endif /* PLANTED_RACE_H */

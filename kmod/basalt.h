/* SPDX-License-Identifier: GPL-2.0 */
/* What the module's files know of each other. */
#ifndef _BASALT_H
#define _BASALT_H

#include <linux/cache.h>
#include <linux/cpumask.h>
#include <linux/percpu.h>
#include <linux/types.h>
#include <linux/wait.h>

#define BASALT "basalt: "

/**
 * enum basalt_cpu_state - whose a CPU is, and where it is on its way
 * @BASALT_CPU_LINUX: Linux's, online or not
 * @BASALT_CPU_CLAIMED: Linux has been asked to give it up
 * @BASALT_CPU_PARKED: ours: it waits in basalt_play_dead()
 * @BASALT_CPU_LEAVING: it was asked to leave that
 * @BASALT_CPU_LEFT: it waits for Linux, as a CPU that was never ours
 * @BASALT_CPU_LOST: it runs a guest that is over, and does not answer
 *
 *  LINUX -> CLAIMED -> PARKED -> LEAVING -> LEFT -> LINUX
 *                        |                  ^
 *                        +----> LOST -------+
 *
 * The CPU itself makes the steps to PARKED and to LEFT, whoever waits for a
 * vCPU that to LOST, whoever holds the lock of claims all others.
 */
enum basalt_cpu_state {
	BASALT_CPU_LINUX,
	BASALT_CPU_CLAIMED,
	BASALT_CPU_PARKED,
	BASALT_CPU_LEAVING,
	BASALT_CPU_LEFT,
	BASALT_CPU_LOST,
};

/**
 * enum basalt_order - what a parked CPU is to do
 * @BASALT_ORDER_NONE: to wait; also what it says when it has done something
 * @BASALT_ORDER_RUN: to run its vCPU
 * @BASALT_ORDER_RUNNING: what it says while it does
 */
enum basalt_order {
	BASALT_ORDER_NONE,
	BASALT_ORDER_RUN,
	BASALT_ORDER_RUNNING,
};

struct basalt_vcpu;
struct desc_ptr;

/**
 * struct basalt_cpu - what is known of one CPU
 * @state: one of enum basalt_cpu_state
 * @order: one of enum basalt_order
 * @vcpu: whom it belongs to while it is parked, if anybody
 * @wait: where somebody waits for BASALT_ORDER_NONE
 * @wake: what the CPU writes to its ICR then
 * @enabled: its own: virtualization is on
 * @apic_base: its own: the APIC as Linux left it
 * @xcr0: its own: which states Linux has switched on
 * @xss: and which of those that only a kernel reaches
 * @bp_cfg: its own: how Linux has its branches predicted
 * @tsc_aux: its own: Linux's number of this CPU
 * @pat: its own: the types of memory that Linux's page tables name
 * @server: its own: the id of the server that it has entered last; what it remembers of addresses is that one's
 */
struct basalt_cpu {
	int state;
	int order;
	struct basalt_vcpu *vcpu;
	wait_queue_head_t wait;
	u64 wake;
	bool enabled;
	u64 apic_base;
	u64 xcr0;
	u64 xss;
	u64 bp_cfg;
	u64 tsc_aux;
	u64 pat;
	u64 server;
} ____cacheline_aligned;

DECLARE_PER_CPU(struct basalt_cpu, basalt_cpus);

/* parked.c: on a CPU that Linux believes to be dead. */
extern void (*basalt_saved_play_dead)(void);
extern void (*basalt_play_dead_common)(void);
void basalt_play_dead(void);

/* enter.S, and the table that it takes interrupts by. */
void basalt_take_interrupt(void);
void basalt_swallow(void);
extern struct desc_ptr basalt_swallow_table;
void basalt_swallow_init(void);

/* wake.c: from such a CPU to whoever waits for it. */
int basalt_wake_init(void);
void basalt_wake_exit(void);
u64 basalt_wake_command(void);

/* claim.c: from Linux and back. */
int basalt_claims_init(void);
void basalt_claims_exit(void);
int basalt_claim_cpus(const struct cpumask *cpus, unsigned int *failed);
void basalt_release_cpus(const struct cpumask *cpus);

/* notify.c: what becomes of claimed CPUs when the host ends or sleeps. */
int basalt_notifiers_register(void);
void basalt_notifiers_unregister(void);
bool basalt_any_claimed(void);
void basalt_abandon_cpus(void);

#endif

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What one operation is, and what it is given: main.c has it sampled and says what that took.
 */
#ifndef BASALT_PROBE_H
#define BASALT_PROBE_H

#include <linux/cpumask.h>
#include <linux/types.h>

/**
 * struct probe - where an operation is measured
 * @cpu: on which it is
 * @peer: another one, or @cpu where there is none
 * @others: all that take part but @cpu
 */
struct probe {
	unsigned int cpu;
	unsigned int peer;
	cpumask_var_t others;
};

/**
 * struct operation - something that has a cost
 * @name: its file's
 * @crowd: it needs a second CPU
 * @busy: other CPUs are kept from halting meanwhile
 * @rests: other CPUs get time to halt before each sample
 * @begin: what is needed for it, in the reader's own context; may be NULL
 * @sample: does it once, on the CPU that is measured, and says how many ticks it took
 * @end: undoes @begin; may be NULL
 */
struct operation {
	const char *name;
	bool crowd;
	bool busy;
	bool rests;
	int (*begin)(struct probe *probe);
	int (*sample)(struct probe *probe, u64 *ticks);
	void (*end)(struct probe *probe);
};

/* Longer than anything here takes, on an emulated processor too. */
#define PATIENCE_MS	2000

/* Ends with one that has no name. */
extern const struct operation register_operations[];
extern const struct operation timer_operations[];
extern const struct operation interrupt_operations[];
extern const struct operation virtio_operations[];

/* Ticks of the TSC. */
u64 ticks_of_ms(unsigned int ms);

#endif

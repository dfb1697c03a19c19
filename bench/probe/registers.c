// SPDX-License-Identifier: GPL-2.0
/*
 * Reading and writing model-specific registers, and CPUID. Everything that is written is what was there.
 */
#include <linux/irqflags.h>
#include <asm/msr.h>
#include <asm/processor.h>

#include "probe.h"

/* What taking the time takes: a part of everything else here. */
static int nothing(struct probe *probe, u64 *ticks)
{
	u64 start = rdtsc_ordered();

	*ticks = rdtsc_ordered() - start;
	return 0;
}

/* Always an exit, in every guest. */
static int identify(struct probe *probe, u64 *ticks)
{
	u64 start = rdtsc_ordered();

	cpuid_eax(0);
	*ticks = rdtsc_ordered() - start;
	return 0;
}

static int read_register(u32 msr, u64 *ticks)
{
	u64 start = rdtsc_ordered();

	native_read_msr(msr);
	*ticks = rdtsc_ordered() - start;
	return 0;
}

/* Read before, each time: who else writes to it does so in interrupts of this CPU, as KVM does. */
static int write_register(u32 msr, u64 *ticks)
{
	unsigned long flags;
	u64 start, value;

	local_irq_save(flags);
	rdmsrl(msr, value);
	start = rdtsc_ordered();
	wrmsrl(msr, value);
	*ticks = rdtsc_ordered() - start;
	local_irq_restore(flags);
	return 0;
}

/* One that guests have for themselves, under KVM too. */
static int read_own(struct probe *probe, u64 *ticks)
{
	return read_register(MSR_KERNEL_GS_BASE, ticks);
}

static int write_own(struct probe *probe, u64 *ticks)
{
	return write_register(MSR_KERNEL_GS_BASE, ticks);
}

/* One that hosts keep for themselves. */
static int read_kept(struct probe *probe, u64 *ticks)
{
	return read_register(MSR_EFER, ticks);
}

static int write_kept(struct probe *probe, u64 *ticks)
{
	return write_register(MSR_EFER, ticks);
}

const struct operation register_operations[] = {
	{ .name = "nothing", .sample = nothing },
	{ .name = "cpuid", .sample = identify },
	{ .name = "rdmsr-own", .sample = read_own },
	{ .name = "wrmsr-own", .sample = write_own },
	{ .name = "rdmsr-kept", .sample = read_kept },
	{ .name = "wrmsr-kept", .sample = write_kept },
	{ }
};

// SPDX-License-Identifier: GPL-2.0
/*
 * What a CPU has learned of one guest's branches is nothing for the next one
 * to be led by, nor for Linux (AMD, "Architecture Guidelines Update for
 * Indirect Branch Control", IBPB). On a CPU that Linux believes to be dead:
 * the same holds as in parked.c.
 */
#include <asm/cpufeature.h>
#include <asm/msr.h>

#include "compat.h"
#include "vm.h"

/* CPUs that Linux has made alike. */
static bool has_ibpb;
static u64 reduced;

/**
 * basalt_predict_init() - finds out what this host's CPUs have
 */
void basalt_predict_init(void)
{
	has_ibpb = boot_cpu_has(X86_FEATURE_IBPB);
	reduced = basalt_reduced_speculation();
}

/**
 * basalt_predict_nothing() - forgets all branches
 */
void notrace basalt_predict_nothing(void)
{
	if (has_ibpb)
		__wrmsr(MSR_IA32_PRED_CMD, PRED_CMD_IBPB, 0);
}

/**
 * basalt_predict_for_guests() - from now on as on a CPU that runs guests
 * @self: what is known of this CPU
 */
void notrace basalt_predict_for_guests(struct basalt_cpu *self)
{
	u64 value;

	if (!reduced)
		return;
	self->bp_cfg = __rdmsr(MSR_ZEN4_BP_CFG);
	value = self->bp_cfg | reduced;
	__wrmsr(MSR_ZEN4_BP_CFG, (u32)value, value >> 32);
}

/**
 * basalt_predict_restore() - as Linux had it
 * @self: what is known of this CPU
 */
void notrace basalt_predict_restore(struct basalt_cpu *self)
{
	if (reduced)
		__wrmsr(MSR_ZEN4_BP_CFG, (u32)self->bp_cfg, self->bp_cfg >> 32);
}

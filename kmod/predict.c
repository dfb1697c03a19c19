// SPDX-License-Identifier: GPL-2.0
/*
 * What a CPU has learned of one guest's branches is nothing for the next one
 * to be led by, nor for Linux (AMD, "Architecture Guidelines Update for
 * Indirect Branch Control", IBPB). On a CPU that Linux believes to be dead:
 * the same holds as in parked.c.
 */
#include <asm/cpufeature.h>
#include <asm/msr.h>

#include "vm.h"

/* CPUs that Linux has made alike. */
static bool has_ibpb;

/**
 * basalt_predict_init() - finds out what this host's CPUs have
 */
void basalt_predict_init(void)
{
	has_ibpb = boot_cpu_has(X86_FEATURE_IBPB);
}

/**
 * basalt_predict_nothing() - forgets all branches
 */
void notrace basalt_predict_nothing(void)
{
	if (has_ibpb)
		__wrmsr(MSR_IA32_PRED_CMD, PRED_CMD_IBPB, 0);
}

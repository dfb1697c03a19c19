/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What is another in one kernel than in the next: nothing else knows of versions.
 *
 * What the module relies on of CPU hotplug, as read in Linux 6.1 and 6.12
 * (arch/x86/kernel/smpboot.c and nmi.c, kernel/cpu.c):
 *
 * - The idle task of a CPU that goes offline calls smp_ops.play_dead() with
 *   interrupts off, and expects nothing of it any more. smp_ops can be written.
 * - play_dead_common() tells once that the CPU is dead: by cpu_report_death(),
 *   from 6.5 on by cpuhp_ap_report_dead(). Whoever takes the CPU offline waits
 *   for that and for nothing else. In 6.1 telling it twice makes the CPU
 *   impossible to bring back, so native_play_dead() is not called afterwards.
 * - What else native_play_dead() does is nothing that we miss: it turns IBRS
 *   off (6.12; Intel's alone), tells tboot (Intel's), and halts.
 * - A CPU that has told is brought back by INIT and SIPI whatever it does by
 *   then. From 6.5 on it may find its number by its APIC's id, in the mode
 *   that the APIC is in: basalt_svm_leave() has made that Linux's again.
 *   Several at a time come only at boot.
 * - An NMI on a CPU that is offline returns at once; from 6.7 on it looks for
 *   new microcode first, of Intel's processors alone.
 */
#ifndef _BASALT_COMPAT_H
#define _BASALT_COMPAT_H

#ifdef __ASSEMBLY__

/*
 * Against what a guest has taught its CPU of returns, as the kernel's own KVM
 * does it behind VMRUN (arch/x86/kvm/svm/vmenter.S). Needs the kernel's GS,
 * and takes @reg, RAX, RCX and RDX.
 */
.macro BASALT_FORGET_RETURNS reg
#ifdef UNTRAIN_RET_VM
	FILL_RETURN_BUFFER \reg, RSB_CLEAR_LOOPS, X86_FEATURE_RSB_VMEXIT
	UNTRAIN_RET_VM
#else
	FILL_RETURN_BUFFER \reg, RSB_CLEAR_LOOPS, X86_FEATURE_RETPOLINE
	UNTRAIN_RET
	ALTERNATIVE "", "call entry_ibpb", X86_FEATURE_IBPB_ON_VMEXIT
#endif
.endm

#else

#include <linux/cc_platform.h>
#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/version.h>
#include <asm/apic.h>
#include <asm/cpufeature.h>
#include <asm/msr-index.h>
#include <asm/smp.h>

/*
 * The address of a function that is not exported. Where a probe could be set
 * is found out first, and told even where none may be. That is behind ENDBR,
 * if the function begins with one.
 */
static inline unsigned long basalt_address_of(const char *name)
{
	struct kprobe probe = { .symbol_name = name };

	if (!register_kprobe(&probe))
		unregister_kprobe(&probe);
	return (unsigned long)probe.addr;
}

/* What this host has that the module does not bear, or NULL. */
static inline const char *basalt_hindrance(void)
{
#ifdef X86_FEATURE_FRED
	/* swallow.c makes an interrupt table, which nobody would look at. */
	if (cpu_feature_enabled(X86_FEATURE_FRED))
		return "interrupts without a table (FRED; the kernel's parameter fred=off turns it off)";
#endif
	/* Functions that the kernel itself never calls by their addresses have no ENDBR. */
	if (cpu_feature_enabled(X86_FEATURE_IBT))
		return "checked calls (IBT; the kernel's parameter ibt=off turns them off)";
#ifdef MSR_AMD64_SYSCFG_SNP_EN
	/* No control block may be at a multiple of 2 MiB there (arch/x86/kvm/svm/sev.c, snp_safe_alloc_page_node()). */
	if (cc_platform_has(CC_ATTR_HOST_SEV_SNP))
		return "pages with owners (SEV-SNP)";
#endif
	/* An address would be another for the CPU than for us. */
	if (cc_platform_has(CC_ATTR_HOST_MEM_ENCRYPT))
		return "encrypted memory (SME; the kernel's parameter mem_encrypt=off turns it off)";
	return NULL;
}

/*
 * What has to be set in MSR_ZEN4_BP_CFG while a CPU runs guests, against SRSO
 * on processors that need nothing else (Zen 5). KVM does the same, from 6.12's
 * stable updates on.
 */
static inline u64 basalt_reduced_speculation(void)
{
#ifdef X86_FEATURE_SRSO_BP_SPEC_REDUCE
	if (boot_cpu_has(X86_FEATURE_SRSO_BP_SPEC_REDUCE))
		return BIT_ULL(MSR_ZEN4_BP_CFG_BP_SPEC_REDUCE_BIT);
#endif
	return 0;
}

/* An NMI for one CPU, whether Linux believes it to be alive or not. */
static inline void basalt_send_nmi(unsigned int cpu)
{
	apic->icr_write(APIC_DM_NMI, per_cpu(x86_cpu_to_apicid, cpu));
}

/*
 * The number of a page that a process sees of a device and may write to. Its
 * map is locked. -EINVAL: there is none, or not yet.
 */
static inline int basalt_device_page(struct mm_struct *mm, unsigned long address, unsigned long *page)
{
	struct vm_area_struct *area = vma_lookup(mm, address);

	if (!area || !(area->vm_flags & VM_PFNMAP) || !(area->vm_flags & VM_WRITE))
		return -EINVAL;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
	struct follow_pfnmap_args args = { .vma = area, .address = address };
	int error = follow_pfnmap_start(&args);

	if (error)
		return error;
	*page = args.pfn;
	error = args.writable ? 0 : -EINVAL;
	follow_pfnmap_end(&args);
	return error;
#else
	return follow_pfn(area, address, page);
#endif
}

/* A mapping is not inherited by children of the process. */
static inline void basalt_keep_from_children(struct vm_area_struct *area)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_set(area, VM_DONTCOPY);
#else
	area->vm_flags |= VM_DONTCOPY;
#endif
}

/* An interrupt for one CPU, by its vector there. */
static inline void basalt_send_fixed(unsigned int cpu, u8 vector)
{
	apic->icr_write(APIC_DM_FIXED | vector, per_cpu(x86_cpu_to_apicid, cpu));
}

#endif
#endif

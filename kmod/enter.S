/* SPDX-License-Identifier: GPL-2.0 */
/* Into a guest and out of it again (AMD64 Architecture Programmer's Manual, volume 2, 15.5). */
#include <linux/linkage.h>
#include <asm/alternative.h>
#include <asm/cpufeatures.h>
#include <asm/ibt.h>
#include <asm/nospec-branch.h>
#include <asm/unwind_hints.h>

#include "compat.h"
#include "regs.h"

	.text

/*
 * void basalt_svm_enter(struct basalt_regs *regs, u64 vmcb, u64 host)
 *
 * Runs the guest of the VMCB at the physical address @vmcb until it exits.
 * What VMSAVE keeps of the host is kept at the physical address @host. With
 * interrupts off, or on behind a CLGI if they are to end a server's run, and
 * off afterwards; between CLGI and STGI not even an NMI finds the guest's GS.
 */
SYM_FUNC_START(basalt_svm_enter)
	push	%rbp
	push	%rbx
	push	%r12
	push	%r13
	push	%r14
	push	%r15
	push	%rdi
	push	%rdx

	clgi
	mov	%rdx, %rax
	vmsave	%rax
	mov	%rsi, %rax
	vmload	%rax

	mov	BASALT_RBX(%rdi), %rbx
	mov	BASALT_RCX(%rdi), %rcx
	mov	BASALT_RDX(%rdi), %rdx
	mov	BASALT_RSI(%rdi), %rsi
	mov	BASALT_RBP(%rdi), %rbp
	mov	BASALT_R8(%rdi), %r8
	mov	BASALT_R9(%rdi), %r9
	mov	BASALT_R10(%rdi), %r10
	mov	BASALT_R11(%rdi), %r11
	mov	BASALT_R12(%rdi), %r12
	mov	BASALT_R13(%rdi), %r13
	mov	BASALT_R14(%rdi), %r14
	mov	BASALT_R15(%rdi), %r15
	mov	BASALT_RDI(%rdi), %rdi

	/* Nor what the host has had in the CPU's buffers for the guest to find. */
	VM_CLEAR_CPU_BUFFERS
	vmrun	%rax

	/* RAX and RSP are the host's again; the guest's are in its VMCB. */
	vmsave	%rax
	push	%rdi
	mov	16(%rsp), %rdi
	mov	%rbx, BASALT_RBX(%rdi)
	mov	%rcx, BASALT_RCX(%rdi)
	mov	%rdx, BASALT_RDX(%rdi)
	mov	%rsi, BASALT_RSI(%rdi)
	mov	%rbp, BASALT_RBP(%rdi)
	mov	%r8, BASALT_R8(%rdi)
	mov	%r9, BASALT_R9(%rdi)
	mov	%r10, BASALT_R10(%rdi)
	mov	%r11, BASALT_R11(%rdi)
	mov	%r12, BASALT_R12(%rdi)
	mov	%r13, BASALT_R13(%rdi)
	mov	%r14, BASALT_R14(%rdi)
	mov	%r15, BASALT_R15(%rdi)
	pop	BASALT_RDI(%rdi)

	/* First of all the host's GS: from 6.2 on what follows writes to this CPU's variables. */
	pop	%rax
	vmload	%rax

	/* What the guest has taught this CPU of returns, and what is left in registers, is not to lead anything astray. */
	BASALT_FORGET_RETURNS %rax
	xor	%ecx, %ecx
	xor	%edx, %edx
	xor	%esi, %esi
	xor	%r8d, %r8d
	xor	%r9d, %r9d
	xor	%r10d, %r10d
	xor	%r11d, %r11d
	/* What a server was to come out for is for the guest that it ran for. */
	cli
	stgi

	pop	%rdi
	pop	%r15
	pop	%r14
	pop	%r13
	pop	%r12
	pop	%rbx
	pop	%rbp
	RET
SYM_FUNC_END(basalt_svm_enter)

/*
 * void basalt_take_interrupt(void)
 *
 * Takes the interrupt that waits, if one does, and does nothing about it.
 */
SYM_FUNC_START(basalt_take_interrupt)
	sub	$16, %rsp
	sidt	(%rsp)
	lidt	basalt_swallow_table(%rip)
	sti
	nop
	nop
	cli
	lidt	(%rsp)
	add	$16, %rsp
	RET
SYM_FUNC_END(basalt_take_interrupt)

SYM_CODE_START(basalt_swallow)
	UNWIND_HINT_IRET_REGS
	ENDBR
	iretq
SYM_CODE_END(basalt_swallow)

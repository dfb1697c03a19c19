/* SPDX-License-Identifier: GPL-2.0 */
/* What svm.c and svm_run.c have in common, and kernels' headers do not have. */
#ifndef _BASALT_SVM_H
#define _BASALT_SVM_H

#include <linux/bits.h>
#include <linux/types.h>

/* MSR_VM_CR, "SVMDIS". */
#ifndef SVM_VM_CR_SVM_DISABLE
#define SVM_VM_CR_SVM_DISABLE	4
#endif

/* EFER: translations of upper levels are kept (5.5.3). Kernels before 6.14 do not use it. */
#define BASALT_EFER_TCE	BIT_ULL(15)

struct basalt_regs;

/* svm.c */
extern u64 basalt_svm_efer_bits;

/* enter.S */
void basalt_svm_enter(struct basalt_regs *regs, u64 vmcb, u64 host);

#endif

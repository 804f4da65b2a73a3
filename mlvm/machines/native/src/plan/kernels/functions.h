/* Elementary functions of floats in plain arithmetic, so that loops over them are vectorized and give the
 * same bits in every lane, in every part of a row and with every instruction set: exp_f32, tanh_f64, ...
 * They use a fused multiply-add only where they say MAD.
 *
 * `python -m tests.ulp` measures the errors: at most 4 units in the last place for every f32, 5 for
 * derivatives. Polynomials and quotients were fitted by the algorithms of Remez and Lawson for the
 * smallest maximum relative error. Coefficients are listed from the constant term on. */
#ifndef MLVM_FUNCTIONS_H
#define MLVM_FUNCTIONS_H

#include "fused.h"

#include <math.h>
#include <stdint.h>

#define MAD_F32 FUSED_F32
#define MAD_F64 FUSED_F64

#define F float
#define MAD MAD_F32
#define U uint32_t
#define FN(name) name##_f32
#define DIGITS 23
#define BIAS 127
#define SIGN 0x80000000u
#define UPPER 0xFFFFF000u
#define SHIFTER 0x1.8p23f
#define INTEGERS 0x1p23f
#define BITS_OF_INTEGERS 0x4B000000u
#define BITS_OF_1 0x3F800000u
#define BITS_OF_SQRT_HALF 0x3F3504F3u
#define LEAST_NORMAL 0x1p-126f
#define SUBNORMAL_SCALE 0x1p25f
#define EXP_MOST 89.0f
#define EXP_LEAST -104.0f
#define EXPM1_LEAST -30.0f
#define TANH_MOST 10.0f
#define ERF_MOST 4.0f
#define GELU_ERF_MOST 14.625f
#define GELU_TANH_MOST 11.0f
#define LINEAR_FROM 6.5f
#define SIGMOID_MOST 30.0f
#define LOG2_E 1.44269504f
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#define LOG2_E_HIGH 1.44287109375f
#define LOG2_E_LOW -1.7605285393e-4f
#define LOG10_E_HIGH 0.434326171875f
#define LOG10_E_LOW -3.1689971365e-5f
#define LOG10_2_HIGH 0.301025390625f
#define LOG10_2_LOW 4.6050390665e-6f
#define C1_HIGH 1.595703125f
#define C1_LOW 6.599660264e-5f
#define C3 0.0713548163f
#define C3_HIGH 0.07135009765625f
#define C3_LOW 4.718616310e-6f
#define SQRT_2 1.41421356f
#define INVERSE_SQRT_TWO_PI 0.398942280f
/* (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2 */
#define EXPM1(r) FN(poly4)(r, 0.5f, 0.16666542f, 0.04166628f, 0.0083667096f, 0.0013946639f)
#define LOG_R(z) (z * FN(poly3)(z, 0xaaaaaa.0p-24f, 0xccce13.0p-25f, 0x91e9ee.0p-25f, 0xf89e26.0p-26f))
/* erf(sqrt(y)) / sqrt(y) - 1 for y <= 1/4 */
#define ERF_NEAR(y) FN(poly4)(y, 0.1283791066f, -0.37612605f, 0.11282722f, -0.02674962f, 0.0047007785f)
/* (e^(a^2 / 2) erfc(a / sqrt(2)) (1 + a) - 1) / a */
#define ERFCX_P(a) FN(poly4)(a, 0.20211558f, 0.0467333756f, -0.0211645104f, -0.0130242771f, -0.00246792915f)
#define ERFCX_Q(a) FN(poly5)(a, 1.0f, 1.70506799f, 1.25024474f, 0.501532435f, 0.112626918f, 0.0122107994f)
#include "functions_of.h"
#include "functions_end.h"

#define F double
#define MAD MAD_F64
#define U uint64_t
#define FN(name) name##_f64
#define DIGITS 52
#define BIAS 1023
#define SIGN 0x8000000000000000u
#define UPPER 0xFFFFFFFFF8000000u
#define SHIFTER 0x1.8p52
#define INTEGERS 0x1p52
#define BITS_OF_INTEGERS 0x4330000000000000u
#define BITS_OF_1 0x3FF0000000000000u
#define BITS_OF_SQRT_HALF 0x3FE6A09E667F3BCDu
#define LEAST_NORMAL 0x1p-1022
#define SUBNORMAL_SCALE 0x1p54
#define EXP_MOST 710.0
#define EXP_LEAST -746.0
#define EXPM1_LEAST -45.0
#define TANH_MOST 20.0
#define ERF_MOST 6.0
#define GELU_ERF_MOST 38.75
#define GELU_TANH_MOST 22.0
#define LINEAR_FROM 8.0
#define SIGMOID_MOST 45.0
#define LOG2_E 1.4426950408889634
#define LN2_HIGH 6.93147180369123816490e-01
#define LN2_LOW 1.90821492927058770002e-10
#define LOG2_E_HIGH 1.4426950514316559
#define LOG2_E_LOW -1.0542692476429138e-08
#define LOG10_E_HIGH 0.4342944845557213
#define LOG10_E_LOW -2.6524694553078553e-09
#define LOG10_2_HIGH 0.3010299956640665
#define LOG10_2_LOW -8.532344317057107e-14
#define C1_HIGH 1.5957691073417664
#define C1_LOW 1.426396435433791e-08
#define C3 0.07135481627260025
#define C3_HIGH 0.071354815736413
#define C3_LOW 5.361872467621785e-10
#define SQRT_2 1.4142135623730951
#define INVERSE_SQRT_TWO_PI 0.3989422804014327
#define EXPM1(r)                                                                                   \
    FN(poly9)                                                                                      \
    (r, 0.5000000000000006, 0.16666666666666685, 0.041666666666572254, 0.008333333333314309,       \
     0.0013888888932864175, 0.0001984126990369594, 2.4801503826738063e-05, 2.7557227306372744e-06, \
     2.762658504866431e-07, 2.511469502571289e-08)
#define LOG_R(z)                                                                                    \
    (z * FN(poly6)(z, 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, \
                   2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,    \
                   1.479819860511658591e-01))
#define ERF_NEAR(y)                                                                                 \
    FN(poly9)                                                                                       \
    (y, 0.1283791670955126, -0.3761263890318375, 0.11283791670954778, -0.026866170644959376,        \
     0.005223977621134771, -0.0008548326403021197, 0.00012055278517703543, -1.4922685271162823e-05, \
     1.6364161271481353e-06, -1.4555606336584478e-07)
#define ERFCX_P(a)                                                                                  \
    FN(poly9)                                                                                       \
    (a, 0.20211543919713146, 0.1799545155036918, 0.05510679980074788, -0.007291283182689545,        \
     -0.012506188945452097, -0.005207870999213042, -0.0012540455450400579, -0.00019161667001213264, \
     -1.780069778550185e-05, -8.014257749387208e-07)
#define ERFCX_Q(a)                                                                          \
    FN(poly10)                                                                              \
    (a, 1.0, 2.3641888922713203, 2.599126974103756, 1.7544372734599873, 0.8078048234185043, \
     0.26612407686838463, 0.06383435323745201, 0.011076750558882636, 0.0013418748619300799, \
     0.0001037251800056681, 3.9651883008865505e-06)
#include "functions_of.h"
#include "functions_end.h"

#endif

"""Which estimators are unbiased, and what the others estimate, without a sample: by enumeration.

The policy is a decoder of 342 float64 parameters that writes at most 3 tokens, so every answer, and every batch of one,
two or three answers, can be written down with its probability. ``ascent`` takes a batch through the functions of a
recipe; its mean over all batches, weighed by probability, is compared with gradients that autograd takes of the
enumerated objective. They agree to nine digits, or the statement is wrong.

Notation: r(y) reward of an answer, l its length, J = E[r], S_t = grad log pi(y_t | state), S their sum, n answers of a
prompt, D(state) = KL(pi || reference) of the next token there.

| what                                               | mean of the update                                   | in       |
|----------------------------------------------------|------------------------------------------------------|----------|
| reinforce (gamma 1), rloo, remax                   | grad J                                               | unbiased |
| gae, lam = 1 or the true values                    | grad J                                               | critic   |
| these with k1 in the reward                        | grad (J - coef KL of whole answers)                  | unbiased |
| k2 or k3 in the reward                             | that + coef E[sum of the estimates' own gradients]   | kl       |
| reinforce_pp_baseline with k1, no whitening        | (n-1)/n grad J - coef E[sum of grad D at each state] | kl       |
| grpo without std; fixed_length of L                | (n-1)/n grad J; (n-1)/(n L) grad J                   | unbiased |
| grpo_leave_one_out                                 | grad J times E[1 / std of the others]                | unbiased |
| grpo with std, two answers                         | E[S sign(r - r of the other)] / sqrt 2: ranks        | biased   |
| grpo with std, two rewards                         | grad J times a number that depends on J              | biased   |
| maxrl, two rewards 0 and 1                         | grad of log J, its series cut after n - 1 terms      | biased   |
| opo, log_mean_exp, any whitening                   | another direction: the baseline knows the answer     | biased   |
| gamma < 1                                          | another direction, and no gradient of a mean         | biased   |
| answers cut off left out (truncated = mask)        | E[r S] without those                                 | biased   |
| sequence_mean_token_mean, gspo, gmpo               | grad E[r / l] - J grad E[1 / l] (with a baseline)    | biased   |
| token_mean                                         | E[r S w(l)], w the mean of n / tokens of the batch   | biased   |
| gae, lam < 1, values off by e                      | + (1-lam) E[sum S_t sum lam^(k-1) e(state k later)]  | critic   |
| k2, or ratio-weighted k1 or k3, in the loss        | - coef E[sum of grad D at each state]                | kl       |
| k1 in the loss; k3 in the loss                     | 0; - coef E[sum of grad KL(reference || pi)]         | kl       |
| stale samples, whole-answer weights                | grad J                                               | stale    |
| stale samples, such weights cut at c               | grad J without the mass above c times the stale      | stale    |
| stale samples, weights of tokens                   | grad of the surrogate: states and values are stale   | stale    |
| clipped, cispo, dppo, sapo, ... at ratio 1         | the plain loss, batch by batch                       | losses   |
| mirror at ratio 1                                  | 2 tau (n-1)/n grad J                                 | losses   |
"""
